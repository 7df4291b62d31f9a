"""Group-relative advantages that weigh a success by how rare it is."""

import numpy as np

from configs.algorithm import Algorithm
from configs.errors import SlipstreamError
from learner.advantages.base import EPSILON, Advantage, AdvantageInputs, Float64


class NegativeReward(SlipstreamError, ValueError, code="SLIP-REWARD-08"):
    """A reward is negative, and the advantage takes none."""


def maxrl(_: Algorithm) -> Advantage:
    """(reward - group mean) / group mean, for rewards >= 0; 0 where no answer of the group has any reward.

    Maximum likelihood reinforcement learning (MaxRL): for rewards 0 and 1 its gradient is that of the log likelihood
    of success, of which the plain policy gradient is the first order.
    """

    def advantage(inputs: AdvantageInputs) -> Float64:
        values = inputs.values
        if (values < 0).any():
            wrong = int(np.flatnonzero(values < 0)[0])
            raise NegativeReward(
                f"reward of trajectory {wrong} is {values[wrong]:g}; algorithm.advantage 'maxrl' divides by the group's"
                " mean and takes rewards >= 0 only"
            )
        mean = inputs.of_groups().mean(values)
        return (values - mean) / (mean + EPSILON)

    return advantage
