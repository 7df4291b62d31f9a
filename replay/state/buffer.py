"""The group buffer: admission, order, the lag bound and the batch in training. No socket, no clock.

Admission bound (invariant 1): leased + buffered + taken groups ≤ (async_lag + 1) × groups_per_step. Groups
keep their order of admission. The group at position n of that order is trained in batch
`version + n // groups_per_step`, so it may carry tokens of versions ≥ that − async_lag: its `min_version`.
Groups that are dropped move later ones forward, which only makes them younger at training time. Batches that a
resumed learner takes again (replay/state/line.py) come before all of them. A bound that a guard lowers holds for the
groups that are admitted from then on; those before them keep theirs.

    Example: groups_per_step 2, async_lag 1, version 5: up to 4 slots; positions 0 and 1 train version 5 and
    need tokens of version ≥ 4, positions 2 and 3 train version 6 and need tokens of version ≥ 5.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from replay.messages import Group
from replay.state.leases import GroupId, Slot, SlotState
from replay.state.line import PolicyLine

OnStale = Literal["wait", "mask", "drop", "substitute"]
IN_ORDER = ("wait", "substitute")
"""Policies under which a batch is of the oldest groups, and no token above the bound is ever sampled."""


class GroupBuffer:
    """All admitted groups in order of admission, the line of policies, and the batch in training."""

    def __init__(self, groups_per_step: int, async_lag: int, on_stale: OnStale, version: int = 0) -> None:
        self.groups_per_step, self.async_lag, self.on_stale = groups_per_step, async_lag, on_stale
        self.configured_lag = async_lag
        """`async_lag` is less once a guard has lowered it."""
        self.version = version
        """Last committed policy version."""
        self.slots: dict[GroupId, Slot] = {}
        """Admitted and in no batch yet."""
        self.line = PolicyLine()
        self.counters: Counter[str] = Counter()
        self.fruitless = 0
        """Prompts that were dropped since a group was last accepted."""

    @property
    def max_groups(self) -> int:
        return (self.async_lag + 1) * self.groups_per_step

    @property
    def taken(self) -> int:
        """Groups in batches that are not committed (again) yet."""
        return len(self.line.groups_ahead(self.version))

    @property
    def in_flight(self) -> int:
        """Groups that count against the admission bound."""
        return len(self.slots) + self.taken

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        return self.max_groups - self.in_flight

    @property
    def masks(self) -> bool:
        """Whether tokens above the lag bound are taken out of the loss."""
        return self.on_stale == "mask"

    def next_min_version(self) -> int:
        """`min_version` of the group that would be admitted now."""
        return self._min_version_at(self.in_flight)

    def needed(self, slot: Slot) -> int:
        """`min_version` of the place that this slot has now; less than at its admission when others before it went."""
        return self._min_version_at(self.taken + list(self.slots).index(slot.group_id))

    def bound(self, slots: Iterable[Slot]) -> int:
        """Highest lag of a token of these: a lower bound holds for groups that are admitted after it was lowered."""
        return max([self.async_lag, *(slot.async_lag for slot in slots)])

    def drop(self, slot: Slot, reason: str) -> None:
        """Remove a group for good, counted under its reason; its place goes to the next prompt."""
        del self.slots[slot.group_id]
        self.counters[f"dropped/{reason}"] += 1
        self.fruitless += reason != "substituted"  # others are finished, or it would have been waited for

    def stale(self) -> list[Slot]:
        """Groups of the next batch that hold tokens above the lag bound; none of them may be taken."""
        return [slot for slot in self.oldest() if self._is_stale(slot)]

    def last_min_version(self) -> int:
        """`min_version` of a group that is here already and goes to the end of the order."""
        return self._min_version_at(self.in_flight - 1)

    def lease_again(self, slot: Slot, min_version: int) -> None:
        """A second try starts with the newest weights, at the end of the order (on_stale `drop`)."""
        slot.recall()
        slot.stale_retries += 1
        slot.min_version, slot.async_lag = min_version, self.async_lag
        self.slots[slot.group_id] = self.slots.pop(slot.group_id)
        self.counters["stale_leased_again"] += 1

    def oldest_missing(self) -> Slot | None:
        """The slot that the next batch waits for, if it waits for one in particular."""
        first = islice(self.slots.values(), self.groups_per_step)
        return next((slot for slot in first if slot.state is not SlotState.BUFFERED), None)

    def commit(self, step: int, digest: str) -> None:
        """Step `step` is in the weights: the room of its groups is free."""
        made = self.line.steps[step]
        if not made.digest:
            self.counters["groups_trained"] += len(made.groups)
        made.digest = digest
        self.version = step

    def dissolve(self, version: int, row: Callable[[GroupId], dict[str, Any]]) -> None:
        """The line ends at `version`: what was taken after it stands first in the order again, not loaded yet."""
        back = []
        for step in self.line.ahead(version):
            made = self.line.steps.pop(step)
            lag = made.async_lag
            for group_id, attempt, min_version, location in made.groups:
                slot = Slot(group_id, row(group_id), min_version, SlotState.BUFFERED, attempt)
                slot.location, slot.async_lag = location, lag
                back.append(slot)
        self.slots = {slot.group_id: slot for slot in [*back, *self.slots.values()]}

    def order_anew(self) -> None:
        """Give every slot the `min_version` of its place, where that is newer."""
        for position, slot in enumerate(self.slots.values(), start=self.taken):
            slot.min_version = max(slot.min_version, self._min_version_at(position))

    def count(self, state: SlotState) -> int:
        return sum(slot.state is state for slot in self.slots.values())

    def _min_version_at(self, position: int) -> int:
        return max(0, self.version + position // self.groups_per_step - self.async_lag)

    def oldest(self) -> list[Slot]:
        """Slots of the next batch, as far as they are here: `wait` does not pass over one that is missing."""
        ready: list[Slot] = []
        for slot in self.slots.values():
            if slot.state is SlotState.BUFFERED:
                ready.append(slot)
            elif self.on_stale in IN_ORDER:
                break
            if len(ready) == self.groups_per_step:
                break
        return ready

    def stragglers(self, older_than: float) -> list[Slot]:
        """Groups without which the next batch is whole: unfinished, and leased first before `older_than`.

        Empty while the batch waits for any other one as well (on_stale `substitute`).
        """
        late: list[Slot] = []
        ready = 0
        for slot in self.slots.values():
            if slot.state is SlotState.BUFFERED:
                ready += 1
            elif slot.begun_at is not None and slot.begun_at < older_than:
                late.append(slot)
            else:
                return []
            if ready == self.groups_per_step:
                return late
        return []

    def _is_stale(self, slot: Slot) -> bool:
        if self.masks:
            return False  # `masked` takes them out
        return slot.oldest_sampled() < self.version - self.bound([slot])

    def masked(self, group: Group, async_lag: int, *, count: bool) -> Group:
        """The group with tokens above the lag bound of its batch taken out of the loss (on_stale `mask`)."""
        oldest = self.version - async_lag
        over_age = (group.versions < oldest) & (group.loss_mask != 0)
        num = int(over_age.sum())
        if not num:
            return group
        if count:
            self.counters["tokens_masked"] += num
        return replace(group, loss_mask=np.where(over_age, np.uint8(0), group.loss_mask))


def drops(counters: Counter[str]) -> dict[str, int]:
    """Dropped groups by reason, the most frequent one first."""
    found = {name.partition("/")[2]: count for name, count in counters.items() if name.startswith("dropped/") and count}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
