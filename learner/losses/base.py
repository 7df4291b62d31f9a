"""What a loss is given and what it returns.

Shapes: a row holds m trajectories one after the other; every tensor over tokens is [n] float32, one element for each
token in the loss. A loss returns one value per token. The caller sums them, each times its weight
(learner/objective/aggregation.py), so microbatches and ranks do not change what a token counts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from configs.algorithm import UNDECLARED, Algorithm, LossTraits, Ratio

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ± this before exp, as in verl: e^20 is past every clip and still finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One row as a loss sees it."""

    logprobs: torch.Tensor
    """[n] of the policy in training; the only one with a gradient."""
    proximal_logprobs: torch.Tensor
    """[n] of the policy that the ratio is taken against (algorithm.proximal)."""
    advantages: torch.Tensor
    """[n]"""
    lengths: torch.Tensor
    """[m] int64, tokens in the loss of each trajectory, n in all; every one above 0."""
    groups: torch.Tensor
    """[m] int64, group of each trajectory."""

    def log_ratio(self) -> torch.Tensor:
        """[n] log of policy over proximal policy, clamped to ± MAX_LOG_RATIO."""
        return log_ratio(self.logprobs, self.proximal_logprobs)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[n] mean of `values` [n] over each trajectory, at each of its tokens."""
        return self.spread(sequence_sums(values, self.lengths) / self.lengths)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[n] from one value per trajectory [m]."""
        return values.repeat_interleave(self.lengths, output_size=len(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss gives back."""

    loss: torch.Tensor
    """[n] float32, with a gradient."""
    clipped: torch.Tensor | None = None
    """[n] bool, tokens whose gradient the loss took away; none for a loss that takes none away."""


Loss = Callable[[LossInputs], LossOutput]
LossFactory = Callable[[Algorithm], Loss]


def declare(*, ratio: Ratio, bounds: tuple[str, ...] = ()) -> Callable[[LossFactory], LossFactory]:
    """Say what a loss of one's own is, above its factory; write the values out, the launcher reads them unrun.

    Args:
        ratio: to the proximal policy that it takes: `token`, `answer` or `none`.
        bounds: which of algorithm.clip_low, clip_high and clip_dual it reads.
    """

    def declared(factory: LossFactory) -> LossFactory:
        factory.traits = LossTraits(ratio, bounds)  # type: ignore[attr-defined]
        return factory

    return declared


def traits_of(factory: LossFactory) -> LossTraits:
    """What a loss from a file declares."""
    declared = getattr(factory, "traits", UNDECLARED)
    return declared if isinstance(declared, LossTraits) else UNDECLARED


def log_ratio(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """log(policy / reference), clamped to ± MAX_LOG_RATIO."""
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """[m] sums of `values` [n] over trajectories of `lengths` [m] tokens, in a fixed order on every device."""
    if not len(lengths):
        return values.new_zeros(0)
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
