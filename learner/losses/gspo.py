"""GSPO: the ratio and its clip belong to the whole answer."""

import torch

from configs.algorithm import Algorithm
from learner.losses.base import Loss, LossInputs, LossOutput

MAX_LOG_SEQUENCE_RATIO = 10.0


def gspo(algorithm: Algorithm) -> Loss:
    """Loss max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)) with s = exp(mean of log r over the answer).

    Zheng et al. 2025 (GSPO), in the token form of its section 4.3: every token carries the value of s and the
    gradient of its own logprob. The paper clips at 3e-4 and 4e-4, and averages over answers
    (`algorithm.aggregation: sequence`).
    """
    low, high = algorithm.clip

    def loss(inputs: LossInputs) -> LossOutput:
        of_answer = inputs.sequence_mean(inputs.log_ratio().detach())
        own = inputs.logprobs - inputs.logprobs.detach()  # 0, with the gradient of the token
        ratio = (of_answer + own).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
        free = -inputs.advantages * ratio
        bounded = -inputs.advantages * ratio.clamp(1 - low, 1 + high)
        return LossOutput(loss=torch.maximum(free, bounded), clipped=bounded > free)

    return loss
