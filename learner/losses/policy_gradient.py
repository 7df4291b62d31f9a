"""The plain policy gradient: right on-policy, biased at any lag without a correction."""

from learner.losses.base import LossInputs, LossOutput, declare


@declare(ratio="none")
def policy_gradient(inputs: LossInputs) -> LossOutput:
    """Loss -A log(policy) (Williams 1992, REINFORCE).

    Refused above lag 0 without a correction, unless algorithm.i_know_this_is_biased is set.
    """
    return LossOutput(loss=-inputs.advantages * inputs.logprobs)
