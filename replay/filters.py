"""Filters: which finished groups are worth a place in a batch (algorithm.dynamic_sampling)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.endings import FilterFails
from replay.messages import Group
from slipstream.runtime import variants
from slipstream.runtime.loading import describe
from slipstream.runtime.variants import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterInputs:
    """A finished group, without the answers that were left out."""

    rewards: NDArray[np.float32]
    """[n] of each answer."""
    lengths: NDArray[np.int32]
    """[n] tokens of each sample; mostly an answer is one."""
    finish_reasons: Sequence[str]
    metrics: Mapping[str, float]
    """What reward and environment measured of the group."""

    @classmethod
    def of(cls, group: Group) -> "FilterInputs":
        return cls(
            rewards=group.rewards,
            lengths=group.lengths,
            finish_reasons=group.finish_reasons,
            metrics=group.reward_metrics,
        )


@dataclass(frozen=True, slots=True)
class FilterFacts:
    """What counters and refusals go by."""

    reason: str = "filtered"
    """Of the prompts that it drops, counted as dropped/<reason>."""
    drops_flat_groups: bool = False


Filter = Callable[[FilterInputs], bool]
"""Whether a group is kept."""


@variants.declare(FilterFacts("flat_rewards", drops_flat_groups=True))
def flat(group: FilterInputs) -> bool:
    """Drop groups whose rewards are all equal (DAPO's dynamic sampling, 2503.14476)."""
    return bool(np.ptp(group.rewards) > 0)


FILTERS: Kind[FilterFacts] = Kind("algorithm.dynamic_sampling", "group", {"flat": flat}, undeclared=FilterFacts())


def keeps(variant: variants.Variant[FilterFacts], group: Group) -> bool:
    """Whether a filter keeps a group. Raises FilterFails."""
    where = f"algorithm.dynamic_sampling: {variant.name!r}, group {group.pass_}/{group.index}:"
    try:
        said: Any = variant.call(FilterInputs.of(group))
    except Exception as error:  # whatever a filter of a user raises
        raise FilterFails(f"{where} {describe(error)}; correct the filter") from error
    if not isinstance(said, bool | np.bool_):
        raise FilterFails(f"{where} gave {said!r}; return true to keep a group, or false")
    return bool(said)
