"""What a loss is given, what it returns, and the measurements that all losses share.

Shapes: B trajectories of a microbatch, T tokens; every tensor is [B, T-1] float32 and column t speaks of the
token predicted from position t. A loss returns one value per token; the caller sums them and divides by the
tokens of the whole batch (global token mean, so microbatches and ranks do not change the weight of a token).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from configs.algorithm import Algorithm

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ± this before exp, as in verl: e^20 is past every clip and still finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One microbatch as a loss sees it; all [B, T-1] float32."""

    logprobs: torch.Tensor
    """Of the policy in training; the only one with a gradient."""
    behaviour_logprobs: torch.Tensor
    """Of the policy that sampled the token."""
    advantages: torch.Tensor
    lags: torch.Tensor
    """Version being trained minus version that sampled the token."""
    mask: torch.Tensor
    """1 where the token is in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Per-token loss, and sums over the microbatch's tokens that ranks may add.

    Sums (0-dim float32, detached): `clipped` tokens held back by the clip, `weight` Σw and `weight_squared` Σw² of
    the ratio w = π/μ against the behaviour policy μ, `k1` and `k3` of KL(μ ‖ π).
    """

    loss: torch.Tensor
    """[B, T-1] float32, 0 where the mask is 0."""
    sums: dict[str, torch.Tensor]


Loss = Callable[[LossInputs], LossOutput]
NamedLoss = Callable[[LossInputs, Algorithm], LossOutput]
"""What the file of a loss defines; with the configuration bound it is a Loss."""


def log_ratio(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """log(π/reference), clamped to ± MAX_LOG_RATIO."""
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def finish(inputs: LossInputs, loss: torch.Tensor, clipped: torch.Tensor | None = None) -> LossOutput:
    """Mask the per-token loss and measure the distance to the behaviour policy.

    k1 = −log w and k3 = w − 1 − log w estimate KL(μ ‖ π) from tokens of μ (Schulman 2020, "Approximating KL
    divergence"). The mask selects rather than multiplies, so nothing outside the loss can leak into it.

    Args:
        inputs: what the loss was computed from.
        loss: [B, T-1] per-token loss, with gradient.
        clipped: [B, T-1] bool, tokens whose gradient the clip removed; none for a loss without a clip.
    """
    in_loss = inputs.mask > 0
    with torch.no_grad():
        delta = log_ratio(inputs.logprobs.detach(), inputs.behaviour_logprobs)[in_loss]
        weight = delta.exp()
        held = clipped[in_loss].sum() if clipped is not None else weight.new_zeros(())
        sums = {
            "clipped": held.to(weight.dtype),
            "weight": weight.sum(),
            "weight_squared": weight.square().sum(),
            "k1": -delta.sum(),
            "k3": (weight - 1 - delta).sum(),
        }
    return LossOutput(loss=torch.where(in_loss, loss, 0.0), sums=sums)
