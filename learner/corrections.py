"""Corrections: weights of tokens by the ratio of trained to behaviour policy. Importing them imports no torch.

rho = numerator / behaviour policy, per token, where the numerator is the proximal policy, or the policy in training
with `algorithm.proximal: behaviour` (then the loss itself has the ratio, or none). A weight has no gradient; 0 takes a
token out of the loss, and tokens that are taken out still count in its mean, as in AReaL: dividing by those that are
left would raise the step when most are refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from configs.algorithm import Algorithm
from learner.losses.base import LossFacts, sequence_sums
from slipstream.runtime.variants import Kind, declare

if TYPE_CHECKING:
    from torch import Tensor

Low = Annotated[float, Field(ge=0, le=1)]
"""A token of the policy itself has the weight 1, so bounds lie on both sides of it."""
High = Annotated[float, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class Rho:
    """log rho of a row."""

    log: "Tensor"
    """[n], without gradient, clamped."""
    lengths: "Tensor"
    """[m] tokens of each trajectory."""

    def spread(self, values: "Tensor") -> "Tensor":
        """[n] from [m]."""
        return values.repeat_interleave(self.lengths, output_size=len(self.log))

    def product(self) -> "Tensor":
        """[n] product over the trajectory, at each of its tokens."""
        return self.spread(sequence_sums(self.log, self.lengths).clamp(-20.0, 20.0)).exp()

    def geometric_mean(self) -> "Tensor":
        """[n] geometric mean over the trajectory, at each of its tokens."""
        return self.spread(sequence_sums(self.log, self.lengths) / self.lengths).exp()


@dataclass(frozen=True, slots=True)
class CorrectionFacts:
    """What refusals go by."""

    masks: bool = True
    """It takes tokens out of the loss; one that only truncates weights does nothing to a loss with the ratio."""


@declare(CorrectionFacts(masks=False))
def token_tis(rho: Rho, *, high: High = 2.0) -> "Tensor":
    """min(rho, high): truncated importance sampling, per token (Yao et al. 2025; verl, slime, SkyRL with 2)."""
    return rho.log.exp().clamp(max=high)


@declare(CorrectionFacts(masks=True))
def icepop(rho: Rho, *, low: Low = 0.5, high: High = 2.0) -> "Tensor":
    """rho where low <= rho <= high, else 0 (Ring-1T 2025, IcePop; verl and SkyRL with 0.5 and 2)."""
    weight = rho.log.exp()
    return weight * within(weight, low, high)


@declare(CorrectionFacts(masks=False))
def sequence_tis(rho: Rho, *, high: High = 5.0) -> "Tensor":
    """min(product of rho over the answer, high) (SkyRL with 5)."""
    return rho.product().clamp(max=high)


@declare(CorrectionFacts(masks=True))
def sequence_mis(rho: Rho, *, low: Low = 0.0, high: High = 3.0) -> "Tensor":
    """Product of rho over the answer where low <= it <= high, else 0: masked importance sampling (TRL with 3)."""
    weight = rho.product()
    return weight * within(weight, low, high)


@declare(CorrectionFacts(masks=True))
def geometric_mis(rho: Rho, *, low: Low = 0.99, high: High = 1.01) -> "Tensor":
    """1 where low <= geometric mean of rho over the answer <= high, else 0 (verl 0.999 and 1.001, SkyRL 0.99, 1.01)."""
    return within(rho.geometric_mean(), low, high).to(rho.log.dtype)


def within(values: "Tensor", low: float, high: float) -> "Tensor":
    """Whether values are in [low, high]."""
    return (values >= low) & (values <= high)


CORRECTIONS: Kind[CorrectionFacts] = Kind(
    "algorithm.correction",
    "rho",
    {kind.__name__: kind for kind in (token_tis, icepop, sequence_tis, sequence_mis, geometric_mis)},
    undeclared=CorrectionFacts(),
)
Correction = Callable[[Rho], "Tensor"]
"""Gives [n] weights >= 0."""


def build_correction(algorithm: Algorithm, loss: LossFacts) -> Correction:
    """The correction of this configuration, with its veto. Raises BadValue.

    A veto takes a whole trajectory out of the loss where one of its tokens has a rho below veto_low or above
    veto_high (slime: below 1e-4): such a token was sampled by another model than the one that is said to have.
    With `proximal: behaviour` and a `loss` that declares the ratio, only where the weight is 0 counts.
    """
    kind: Correction | None = None
    if algorithm.correction is not None:
        kind = CORRECTIONS.build(algorithm.correction).guarded(_problem_with)
    mask_only = loss.has_ratio and algorithm.proximal == "behaviour"

    def weights(rho: Rho) -> "Tensor":
        weight = rho.log.new_ones(rho.log.shape)
        if kind is not None:
            weight = kind(rho)
            if mask_only:
                weight = (weight > 0).to(weight.dtype)
        if algorithm.veto_low > 0 or algorithm.veto_high > 0:
            ratio = rho.log.exp()
            wrong = ratio < algorithm.veto_low
            if algorithm.veto_high > 0:
                wrong |= ratio > algorithm.veto_high
            refused = rho.spread(sequence_sums(wrong.to(rho.log.dtype), rho.lengths) > 0)
            weight = weight.masked_fill(refused, 0.0)
        return weight

    return weights


def _problem_with(weight: Any, rho: Rho) -> str:
    """Why these are no weights of the tokens; empty where they are."""
    shape = getattr(weight, "shape", None)
    if shape == rho.log.shape and bool((weight.isfinite() & (weight >= 0)).all()):
        return ""
    return (
        f"gave weights of shape {list(shape or ())}, or some that are negative or not finite, for {len(rho.log)}"
        " tokens; return one finite weight >= 0 for each"
    )
