"""The plain policy gradient: right on-policy, biased at any lag. A negative control."""

from configs.algorithm import Algorithm
from learner.losses.base import Loss, LossInputs, LossOutput, finish


def policy_gradient(algorithm: Algorithm) -> Loss:
    """Loss −A log π, per token (Williams 1992, REINFORCE), with no correction for lag.

    The configuration refuses it above lag 0 unless algorithm.i_know_this_is_biased is set.
    """

    def loss(inputs: LossInputs) -> LossOutput:
        return finish(inputs, -inputs.advantages * inputs.logprobs)

    return loss
