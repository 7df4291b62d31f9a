"""Does it fit: the memory budget of a learner GPU, with its figures."""

from pathlib import Path

from configs.errors import NoRoom
from configs.machine import gpu_bytes
from configs.schema import Config
from learner.beside.folders import beside
from learner.policy.memory import ENGINE_SHARE, GIB, OF_RANK_0, Setup, available_bytes, choose, host_items_of, refusal
from slipstream.families.pictures import decoder_of
from slipstream.families.sizes import Sizes
from slipstream.runtime.fingerprint import FingerprintError, read_json


def sizes_of(config: Config) -> Sizes | None:
    """Of the policy; None where its config.json, or one beside it, cannot be read, which other checks name."""
    try:
        *_, own = (read_json(Path(path) / "config.json") for path in (*beside(config).values(), config.model.path))
        return Sizes.of(decoder_of(own))
    except (FingerprintError, LookupError, TypeError, ValueError):
        return None


def unknown(config: Config) -> list[str]:
    """`gpu-memory` and what would make it known, where placement.device is cuda and no GPU is."""
    is_known = config.placement.device != "cuda" or config.placement.gpu_gib is not None or gpu_bytes() is not None
    return [] if is_known else ["gpu-memory (set placement.gpu_gib)"]


def memory_budget(config: Config) -> str:
    """What a learner GPU's memory goes to; empty on a CPU and without a model folder.

    Raises:
        ConfigError: it does not fit into placement.gpu_gib, or into what this machine's GPUs have.
    """
    path, available = Path(config.model.path) / "config.json", available_bytes(config)
    if config.placement.device == "cpu" or not path.exists():
        return ""
    model = decoder_of(read_json(path))
    if available is not None and (text := refusal(config, model, available)):
        raise NoRoom(text)
    return f"memory of a learner GPU, at most:\n{choose(Setup.of(config, model), available).describe(available)}\n"


def host_budget(config: Config) -> tuple[int, str]:
    """Pinned host memory of the ranks on the fullest learner node, and what it goes to; 0 without a model folder.

    Raises:
        ConfigError: as `available_bytes`.
    """
    path = Path(config.model.path) / "config.json"
    if not path.exists():
        return 0, ""
    setup, ranks = Setup.of(config, decoder_of(read_json(path))), max(len(share.learner) for share in config.shares)
    items = host_items_of(setup, choose(setup, available_bytes(config)))
    total = sum(size * (1 if what.endswith(OF_RANK_0) else ranks) for what, size in items.items())
    said = ", ".join(f"{what} {size / GIB:.1f}" for what, size in items.items())
    return total, f"{total / GIB:.1f} GiB of host memory for {ranks} learner rank(s) on a node ({said} each)"


def check_engine(config: Config) -> None:
    """Raises ConfigError: the weights of an engine alone are more than its GPUs have."""
    sizes, given = sizes_of(config), config.placement.gpu_gib
    if config.placement.device == "cpu" or sizes is None or not config.needs_servers:
        return
    there = int(given * GIB) if given is not None else gpu_bytes()
    ranks = config.placement.tensor_parallel
    needs = sizes.parameters * (4 if config.rollout.dtype == "float32" else 2) // ranks
    if there is not None and needs > ENGINE_SHARE * there:
        enough = next((n for n in (2, 4, 8, 16) if n > ranks and needs * ranks / n < ENGINE_SHARE * there), 2 * ranks)
        raise NoRoom(
            f"placement.tensor_parallel: {ranks}: {config.model.path} takes {needs / GIB:.1f} GiB on each GPU of an"
            f" engine, before any KV cache, and it has {there / GIB:.1f} GiB; take {enough}, or a smaller model"
        )
