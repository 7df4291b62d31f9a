"""A loss: PPO's clip, bounded on both sides (INTELLECT-2). `algorithm.loss: {loss.py:two_sided: {most: 3}}`."""

from learner.losses import LossInputs, LossOutput, declare


@declare(ratio="token")
def two_sided(inputs: LossInputs, *, low: float = 0.2, high: float = 0.28, most: float = 4.0) -> LossOutput:
    """[n] one value for each token in the loss."""
    ratio = inputs.log_ratio().exp()
    free = -inputs.advantages * ratio.clamp(max=most)
    bounded = -inputs.advantages * ratio.clamp(1 - low, 1 + high)
    return LossOutput(loss=free.maximum(bounded), clipped=bounded > free)
