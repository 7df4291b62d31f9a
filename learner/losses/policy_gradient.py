"""The plain policy gradient: right on-policy, biased at any lag without a correction."""

from configs.algorithm import Algorithm
from learner.losses.base import Loss, LossInputs, LossOutput


def policy_gradient(_: Algorithm) -> Loss:
    """Loss -A log(policy) (Williams 1992, REINFORCE).

    The configuration refuses it above lag 0 without a correction, unless algorithm.i_know_this_is_biased is set.
    """

    def loss(inputs: LossInputs) -> LossOutput:
        return LossOutput(loss=-inputs.advantages * inputs.logprobs)

    return loss
