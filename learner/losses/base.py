"""What a loss is given, what it returns, and what it declares. Importing it imports no torch.

Shapes: a row holds m trajectories one after the other; every tensor over tokens is [n] float32, one element for each
token in the loss. A loss returns one value per token. The caller sums them, each times its weight
(learner/objective/aggregation.py), so microbatches and ranks do not change what a token counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from configs import Config
from slipstream.runtime import variants

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to ± this before exp, as in verl: e^20 is past every clip and still finite."""
Ratio = Literal["none", "token", "answer"]
Below = Annotated[float, Field(gt=0, le=1)]
"""How far below 1 a ratio may be."""
Above = Annotated[float, Field(gt=0)]
"""How far above 1 a ratio may be."""


@dataclass(frozen=True, slots=True)
class LossFacts:
    """What guards of lag and correction go by."""

    ratio: Ratio = "none"
    """Of policy to proximal policy that the loss takes: none, each token's own, or one of the whole answer."""
    refuses: Callable[..., str] | None = None
    """Given the configuration and its options by name: why it cannot train this run, or an empty string."""

    @property
    def has_ratio(self) -> bool:
        return self.ratio != "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """One row as a loss sees it."""

    logprobs: "Tensor"
    """[n] of the policy in training; the only one with a gradient."""
    proximal_logprobs: "Tensor"
    """[n] of the policy that the ratio is taken against (algorithm.proximal)."""
    advantages: "Tensor"
    """[n]"""
    lengths: "Tensor"
    """[m] int64, tokens in the loss of each trajectory, n in all; every one above 0."""
    groups: "Tensor"
    """[m] int64, group of each trajectory."""

    def log_ratio(self) -> "Tensor":
        """[n] log of policy over proximal policy, clamped to ± MAX_LOG_RATIO."""
        return log_ratio(self.logprobs, self.proximal_logprobs)

    def sequence_mean(self, values: "Tensor") -> "Tensor":
        """[n] mean of `values` [n] over each trajectory, at each of its tokens."""
        return self.spread(sequence_sums(values, self.lengths) / self.lengths)

    def spread(self, values: "Tensor") -> "Tensor":
        """[n] from one value per trajectory [m]."""
        return values.repeat_interleave(self.lengths, output_size=len(self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """What a loss gives back, where it has more to say than the values."""

    loss: "Tensor"
    """[n] float32, with a gradient."""
    clipped: "Tensor | None" = None
    """[n] bool, tokens whose gradient the loss took away; none for a loss that takes none away."""


def declare(*, ratio: Ratio, refuses: Callable[[Config, Any], str] | None = None) -> Callable[..., Any]:
    """Say what a loss is, above its function.

    Args:
        ratio: to the proximal policy that it takes: `token`, `answer` or `none`.
        refuses: given the configuration, and the options by name: why it cannot train this run; empty where it can.
    """
    return variants.declare(LossFacts(ratio, refuses))


def log_ratio(logprobs: "Tensor", reference: "Tensor") -> "Tensor":
    """log(policy / reference), clamped to ± MAX_LOG_RATIO."""
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values: "Tensor", lengths: "Tensor") -> "Tensor":
    """[m] sums of `values` [n] over trajectories of `lengths` [m] tokens, in a fixed order on every device."""
    from torch import segment_reduce  # here, so that a launcher may look at losses without torch

    if not len(lengths):
        return values.new_zeros(0)
    return segment_reduce(values, "sum", lengths=lengths, unsafe=True)
