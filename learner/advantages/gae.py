"""Generalized advantage estimation over tokens, from a critic's values."""

import numpy as np
from numpy.typing import NDArray

from learner.advantages.base import Float64


def gae(
    rewards: Float64, values: Float64, lengths: NDArray[np.int64], *, gamma: float, lam: float
) -> tuple[Float64, Float64]:
    """Advantages and returns of every token. Schulman et al. 2016 (GAE), equations 11 and 16.

    delta_t = r_t + gamma V_{t+1} - V_t, with V = 0 after the last token; A_t = delta_t + gamma lambda A_{t+1};
    the return that the critic learns is A_t + V_t.

    Args:
        rewards: [n] reward of each token, trajectories one after the other; usually 0 but at the last token.
        values: [n] the critic's, before the token.
        lengths: [m] tokens of each trajectory, all above 0, n in all.
        gamma: discount; 1 in RL from verifiable rewards.
        lam: lambda; 1 makes returns of Monte Carlo, 0 of one step.

    Returns:
        Two [n] float64 arrays.
    """
    ends = np.cumsum(lengths)
    advantages = np.zeros_like(values)
    following, next_value = np.zeros(len(lengths)), np.zeros(len(lengths))
    for back in range(1, int(lengths.max(initial=0)) + 1):  # from the last token of all trajectories at once
        live = lengths >= back
        at = ends[live] - back
        delta = rewards[at] + gamma * next_value[live] - values[at]
        following[live] = delta + gamma * lam * following[live]
        next_value[live] = values[at]
        advantages[at] = following[live]
    return advantages, advantages + values
