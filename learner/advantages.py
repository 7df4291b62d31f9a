"""Advantages: how much better an answer was than its siblings. Pure, and bit-identical on every rank."""

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]

EPSILON = 1e-4
"""Added to a group's standard deviation."""


def grpo(rewards: Float32, groups: NDArray[np.int32], *, normalize_by_std: bool) -> Float32:
    """Group-relative advantages: (reward − group mean) / (group std + EPSILON).

    GRPO (Shao et al. 2024, DeepSeekMath, section 4.1); without the division Dr. GRPO (Liu et al. 2025). The paper
    leaves the kind of standard deviation open: this is the unbiased one (divisor n − 1), as in verl and TRL.
    Every rank computes all N values from the same arrays, in float64 and in index order, so that no rank
    can disagree with another about which trajectory has an advantage of zero.

        Example: rewards [1, 0, 0, 0] of one group have mean 0.25 and std 0.5: advantages [1.5, -0.5, -0.5, -0.5].

    Args:
        rewards: [N] float32, finite.
        groups: [N] integer, group of each trajectory, any labels.
        normalize_by_std: divide by the group's standard deviation.

    Returns:
        [N] float32. Exactly 0 where all rewards of a group are equal, hence in a group of one.
    """
    if not rewards.size:
        return np.zeros(0, np.float32)
    _, index = np.unique(groups, return_inverse=True)
    # float64 holds every sum of float32 rewards of one size exactly, so equal rewards centre to exactly 0: a residue
    # of 1e-17 would keep a group without any signal in the batch.
    values = rewards.astype(np.float64)
    sizes = np.bincount(index)
    centred = values - (np.bincount(index, weights=values) / sizes)[index]
    if normalize_by_std:
        variance = np.bincount(index, weights=centred * centred) / np.maximum(sizes - 1, 1)
        centred = centred / (np.sqrt(variance) + EPSILON)[index]
    return centred.astype(np.float32)
