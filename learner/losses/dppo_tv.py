"""DPPO-TV: a trust region on probabilities instead of ratios."""

from typing import Annotated

from pydantic import Field

from learner.losses.base import LossInputs, LossOutput, declare

MAX_RATIO = 20.0
"""Of verl: above it a ratio weighs no more."""
Share = Annotated[float, Field(gt=0, lt=1)]
Factor = Annotated[float, Field(ge=0)]


@declare(ratio="token")
def dppo_tv(inputs: LossInputs, *, delta: Share = 0.2, kl: Factor = 1e-3) -> LossOutput:
    """Loss -A r where the token may still move, plus kl (log r)^2; 0 for a token that has moved far enough.

    A token with A > 0 is left out once its probability is delta above the proximal one, with A < 0 once it is as
    much below: the bound of total variation in place of a ratio's, which is loose for likely tokens and tight for rare
    ones. prime-rl's default loss (delta 0.2, its kl_tau 1e-3), and `dppo_tv` in verl, whose cap of the ratio it has: a
    token that the proximal policy gave 1e-6 may move within delta and have a ratio of 1e5.
    """
    log_ratio = inputs.log_ratio()
    moved = inputs.logprobs.detach().exp() - inputs.proximal_logprobs.exp()
    far = moved * inputs.advantages.sign() > delta
    weight = log_ratio.detach().exp().clamp(max=MAX_RATIO)
    # of value and gradient of A r while r is below the cap; above it the gradient grows no more
    value = -inputs.advantages * weight * (1 + inputs.logprobs - inputs.logprobs.detach())
    return LossOutput(loss=value.masked_fill(far, 0.0) + kl * log_ratio.square(), clipped=far)
