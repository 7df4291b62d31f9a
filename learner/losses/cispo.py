"""CISPO: the ratio is a clipped weight, so every token keeps a gradient."""

from learner.losses.base import Above, LossInputs, LossOutput, declare


@declare(ratio="token")
def cispo(inputs: LossInputs, *, clip_high: Above = 4.0) -> LossOutput:
    """Loss -min(r, 1 + clip_high) A log(policy), the weight without gradient.

    MiniMax-M1 (2025). There is no lower bound; slime takes 5 for the upper one (`clip_high: 4`), as TRL and ScaleRL
    do. `clipped` counts tokens whose weight was bounded; they still have a gradient.
    """
    ratio = inputs.log_ratio().detach().exp()
    weight = ratio.clamp(max=1 + clip_high)
    return LossOutput(loss=-weight * inputs.advantages * inputs.logprobs, clipped=ratio > weight)
