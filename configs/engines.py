"""Engines that rollout.engine chooses from: what each needs and has. rollout_server/engines builds them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a budget, a check or a job asks of an engine."""

    package: str | None = None
    """An extra installs it, which is called the same; None needs the core install alone."""
    kernels: tuple[str, ...] = ()
    """Modules that it imports on GPUs when the first answer asks for them."""
    has_own_decoder: bool = False
    """It computes models by code of ours, those that their records name."""
    has_processes: bool = False
    """Of its own, with its weights: they map updates from /dev/shm, or receive them (weight_bus.stage_in)."""
    fills_gpus: bool = False
    """It takes all memory that it finds (KV cache, CUDA graphs), unless it is given a share."""
    adapts_with_pictures: bool = True
    """Updates of adapters alone fit models that take pictures."""
    patch_values: Mapping[str, int] = field(default_factory=dict)
    """Of a picture's patch, by model_type: the only number that it takes for pixels."""


ENGINES: Mapping[str, EngineFacts] = {
    "torch": EngineFacts(has_own_decoder=True),
    "sglang": EngineFacts(
        package="sglang",
        kernels=("sgl_kernel", "triton"),
        has_processes=True,
        fills_gpus=True,
        adapts_with_pictures=False,
        patch_values={"qwen2_5_vl": 1176},  # 3 colours, 2 frames, 14 x 14 pixels
    ),
}
