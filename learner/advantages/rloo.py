"""REINFORCE with the other answers of the group as baseline."""

import numpy as np

from learner.advantages.base import AdvantageInputs, Float64, declare


@declare(compares_within_groups=True)
def rloo(inputs: AdvantageInputs) -> Float64:
    """Reward - mean reward of the other trajectories of its group: (reward - group mean) · n / (n - 1).

    Kool et al. 2019; Ahmadian et al. 2024. A group of one has no baseline and gets 0.
    """
    values, groups = inputs.values, inputs.of_groups()
    sizes = groups.sizes[groups.index]
    return (values - groups.mean(values)) * sizes / np.maximum(sizes - 1, 1)
