"""REINFORCE with the other answers of the group as baseline."""

import numpy as np

from configs.algorithm import Algorithm
from learner.advantages.base import Advantage, AdvantageInputs, Float64


def rloo(_: Algorithm) -> Advantage:
    """Reward - mean reward of the other trajectories of its group: (reward - group mean) · n / (n - 1).

    Kool et al. 2019; Ahmadian et al. 2024. A group of one has no baseline and gets 0.
    """

    def advantage(inputs: AdvantageInputs) -> Float64:
        values, groups = inputs.values, inputs.of_groups()
        sizes = groups.sizes[groups.index]
        return (values - groups.mean(values)) * sizes / np.maximum(sizes - 1, 1)

    return advantage
