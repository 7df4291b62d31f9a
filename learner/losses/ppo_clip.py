"""PPO clip: against the behaviour policy, the clip is the off-policy correction itself."""

from typing import Annotated

from pydantic import AfterValidator, Field

from learner.losses.base import Above, Below, LossInputs, LossOutput, declare


def _bounds_more_than_its_start(value: float) -> float:
    if 0 < value <= 1:
        raise ValueError(
            "it bounds the ratio of every answer of negative advantage where it starts, at 1, so none has a gradient;"
            " take more than 1 + clip_high, such as 3, or 0 for no such bound"
        )
    return value


Dual = Annotated[float, Field(ge=0), AfterValidator(_bounds_more_than_its_start)]


@declare(ratio="token")
def ppo_clip(
    inputs: LossInputs, *, clip_low: Below = 0.2, clip_high: Above = 0.28, clip_dual: Dual = 0.0
) -> LossOutput:
    """Loss max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); for A < 0 at most -A clip_dual, if that is set.

    Schulman et al. 2017, equation 7; separate bounds after DAPO (Yu et al. 2025, "clip-higher"); the dual clip after
    Ye et al. 2020 (verl 3): without it a negative advantage times a large ratio has no bound. With `proximal:
    behaviour` r is taken against the policy that sampled the token, whatever its lag (bypass mode in verl's words);
    with another one, and a correction for its distance to the behaviour policy, this is decoupled PPO (Hilton et al.
    2022).
    """
    ratio, advantages = inputs.log_ratio().exp(), inputs.advantages
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    value, clipped = free.maximum(bounded), bounded > free
    if clip_dual:
        most = -advantages * clip_dual
        held = (advantages < 0) & (value > most)
        value, clipped = most.where(held, value), clipped | held
    return LossOutput(loss=value, clipped=clipped)
