"""The plain policy gradient: right on-policy, biased at any lag. A negative control."""

from configs.algorithm import Algorithm
from learner.losses.base import LossInputs, LossOutput, finish


def policy_gradient(inputs: LossInputs, algorithm: Algorithm) -> LossOutput:
    """Loss −A log π, per token (Williams 1992, REINFORCE), with no correction for lag.

    The configuration refuses it above lag 0 unless algorithm.i_know_this_is_biased is set.
    """
    return finish(inputs, -inputs.advantages * inputs.logprobs)
