"""Inputs of advantages, and the sums over groups that they need. Pure, on the host.

Every rank computes all N values from the same arrays, in float64 and in index order, so no rank can disagree with
another about which trajectory has an advantage of zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs import Config
from slipstream.runtime import variants

Float64 = NDArray[np.float64]

EPSILON = 1e-4
"""Added to a standard deviation before a division, as in TRL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """The whole batch, the same on every rank."""

    rewards: NDArray[np.float32]
    """[N] reward of each trajectory."""
    groups: NDArray[np.int32]
    """[N] group of each trajectory, any labels >= 0."""
    loss_tokens: NDArray[np.int32]
    """[N] tokens in the loss of each trajectory."""

    @property
    def values(self) -> Float64:
        """[N] rewards. float64 holds every sum of float32 rewards of one size exactly, so equal rewards centre to
        exactly 0: a residue of 1e-17 would keep a group without any signal in the batch."""
        return self.rewards.astype(np.float64)

    def of_groups(self) -> "Groups":
        """Sums over groups."""
        _, index = np.unique(self.groups, return_inverse=True)
        return Groups(index, np.bincount(index))


@dataclass(frozen=True, slots=True)
class Groups:
    """Which group each of N trajectories is in, of G groups."""

    index: NDArray[np.int64]
    """[N] 0 to G-1."""
    sizes: NDArray[np.int64]
    """[G] trajectories of each group."""

    def mean(self, values: Float64) -> Float64:
        """[N] mean of each trajectory's group."""
        means: Float64 = np.bincount(self.index, weights=values) / self.sizes
        return means[self.index]

    def std(self, values: Float64) -> Float64:
        """[N] unbiased standard deviation (divisor n - 1) of each trajectory's group; 0 for a group of one."""
        squares = (values - self.mean(values)) ** 2
        variance: Float64 = np.bincount(self.index, weights=squares) / np.maximum(self.sizes - 1, 1)
        return np.sqrt(variance)[self.index]


def whiten(values: Float64, loss_tokens: NDArray[np.int32]) -> Float64:
    """Values minus their mean over their standard deviation, each counted once for every token in the loss.

    Exactly 0 everywhere if all are equal.
    """
    weights = loss_tokens.astype(np.float64)
    total = weights.sum()
    if total == 0 or np.ptp(values[weights > 0]) == 0:
        return np.zeros_like(values)
    centred = values - (weights * values).sum() / total
    variance = (weights * centred**2).sum() / max(total - 1, 1)
    return np.asarray(centred / (np.sqrt(variance) + EPSILON), np.float64)


Advantage = Callable[[AdvantageInputs], Float64]
"""Gives [N] values, exactly 0 where a trajectory teaches nothing."""


@dataclass(frozen=True, slots=True)
class AdvantageFacts:
    """What replay, guards and refusals go by."""

    compares_within_groups: bool = False
    """An answer is compared with the others of its group: a group of one teaches nothing."""
    leaves_out_flat_groups: bool = False
    """A group whose rewards are all equal has advantages of 0."""
    needs_critic: bool = False
    """Advantages are of tokens, from a critic's values (learner/beside)."""
    refuses: Callable[[Config, Any], str] | None = None
    """Given the configuration and its options by name: why it cannot train this run, or an empty string."""


def declare(
    *,
    compares_within_groups: bool,
    leaves_out_flat_groups: bool | None = None,
    needs_critic: bool = False,
    refuses: Callable[[Config, Any], str] | None = None,
) -> Callable[..., Any]:
    """Say what an advantage is, above its function."""
    flat = compares_within_groups if leaves_out_flat_groups is None else leaves_out_flat_groups
    return variants.declare(AdvantageFacts(compares_within_groups, flat, needs_critic, refuses))
