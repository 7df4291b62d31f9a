"""GSPO: the ratio and its clip belong to the whole answer."""

from typing import Any

from configs import Config
from learner.losses.base import Above, Below, LossInputs, LossOutput, declare

MAX_LOG_SEQUENCE_RATIO = 10.0
LEAST_CLIP = 0.01
"""Narrowest bounds against a 16-bit engine, whose rounding moves the ratio of an answer by up to half as much."""
WIDE_CLIP = 0.02


def _rounding_passes(config: Config, options: dict[str, Any]) -> str:
    low, high = options["clip_low"], options["clip_high"]
    is_exact = config.rollout.dtype == config.learner.compute_dtype == "float32"
    if is_exact or config.algorithm.proximal == "current" or min(low, high) >= LEAST_CLIP:
        return ""
    return (
        f"clip_low {low:g} and clip_high {high:g} are for a ratio against logprobs that the trainer computed again;"
        " here it is against a 16-bit engine, whose rounding alone passes them; set both to"
        f" {WIDE_CLIP:g} (at least {LEAST_CLIP:g}), or algorithm.proximal=current with algorithm.correction=token_tis"
    )


@declare(ratio="answer", refuses=_rounding_passes)
def gspo(inputs: LossInputs, *, clip_low: Below = 3e-4, clip_high: Above = 4e-4) -> LossOutput:
    """Loss max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)) with s = exp(mean of log r over the answer).

    Zheng et al. 2025 (GSPO), in the token form of its section 4.3: every token carries the value of s and the
    gradient of its own logprob. The paper clips at 3e-4 and 4e-4, and averages over answers
    (`algorithm.aggregation: sequence`).
    """
    of_answer = inputs.sequence_mean(inputs.log_ratio().detach())
    own = inputs.logprobs - inputs.logprobs.detach()  # 0, with the gradient of the token
    ratio = (of_answer + own).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    free = -inputs.advantages * ratio
    bounded = -inputs.advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return LossOutput(loss=free.maximum(bounded), clipped=bounded > free)
