"""The group buffer: admission, order, the lag bound and the batch in training. No socket, no clock.

Admission bound (invariant 1): leased + buffered + taken groups ≤ (async_lag + 1) × groups_per_step. Groups
keep their order of admission. The group at position n of that order is trained in batch
`version + n // groups_per_step`, so it may carry tokens of versions ≥ that − async_lag: its `min_version`.
Groups that are dropped move later ones forward, which only makes them younger at training time.

    Example: groups_per_step 2, async_lag 1, version 5: up to 4 slots; positions 0 and 1 train version 5 and
    need tokens of version ≥ 4, positions 2 and 3 train version 6 and need tokens of version ≥ 5.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from replay.leases import GroupId, Slot, SlotState

OnStale = Literal["wait", "mask", "drop"]


class OutOfStep(RuntimeError):
    """A message does not fit the state of the buffer; the sender is wrong or late."""


@dataclass(frozen=True, slots=True)
class Formed:
    """The batch of one step: its slots, oldest admitted first."""

    step: int
    slots: list[Slot]


class GroupBuffer:
    """All admitted groups in order of admission, and the batch in training."""

    def __init__(self, groups_per_step: int, async_lag: int, on_stale: OnStale, version: int = 0) -> None:
        self.groups_per_step = groups_per_step
        self.async_lag = async_lag
        self.on_stale = on_stale
        self.version = version
        """Last committed policy version."""
        self.slots: dict[GroupId, Slot] = {}
        self.formed: Formed | None = None
        self.counters: Counter[str] = Counter()

    @property
    def max_groups(self) -> int:
        """The admission bound."""
        return (self.async_lag + 1) * self.groups_per_step

    @property
    def room(self) -> int:
        """Groups that may be admitted now."""
        return self.max_groups - len(self.slots)

    def next_min_version(self) -> int:
        """`min_version` of the group that would be admitted now."""
        return max(0, self.version + len(self.slots) // self.groups_per_step - self.async_lag)

    def admit(self, group_id: GroupId, row: dict[str, Any]) -> Slot:
        """Admit the next prompt (→ QUEUED)."""
        assert self.room > 0 and group_id not in self.slots
        slot = Slot(group_id, row, self.next_min_version())
        self.slots[group_id] = slot
        return slot

    def drop(self, slot: Slot, reason: str) -> None:
        """Remove a group for good, counted under its reason; its place goes to the next prompt."""
        assert slot.state is not SlotState.TAKEN
        del self.slots[slot.group_id]
        self.counters[f"dropped/{reason}"] += 1

    def form(self, step: int) -> Formed | None:
        """The batch of `step`, formed once and then always the same (→ TAKEN); None while it is incomplete.

        `wait` takes the oldest admitted groups and waits for them; `mask` and `drop` take the oldest that
        are complete. Every token is checked against the lag bound once more.

        Raises:
            OutOfStep: `step` is not the step after the last commit.
        """
        if self.formed is not None and self.formed.step == step:
            return self.formed
        if step != self.version + 1:
            raise OutOfStep(f"batch {step} was asked for, but version {self.version} is the last committed one")
        slots = self._oldest()
        while stale := [slot for slot in slots if self._is_stale(slot)]:
            self._treat(stale)  # each is masked or gone, so this ends
            slots = self._oldest()
        if len(slots) < self.groups_per_step:
            return None
        for slot in slots:
            slot.state = SlotState.TAKEN
        self.formed = Formed(step, slots)
        return self.formed

    def oldest_missing(self) -> Slot | None:
        """The slot that the next batch waits for, if it waits for one in particular."""
        ready = 0
        for slot in self.slots.values():
            if slot.state is SlotState.TAKEN:
                continue
            if slot.state is not SlotState.BUFFERED:
                return slot
            ready += 1
            if ready == self.groups_per_step:
                return None
        return None

    def commit(self, step: int) -> bool:
        """Step `step` is in the weights: its groups are gone, their room is free. False for a repeated commit.

        Raises:
            OutOfStep: the batch of `step` was never formed.
        """
        if step <= self.version:
            return False
        if self.formed is None or self.formed.step != step:
            raise OutOfStep(f"commit of step {step}, but its batch was not taken (version {self.version})")
        for slot in self.formed.slots:
            del self.slots[slot.group_id]
        self.counters["groups_trained"] += len(self.formed.slots)
        self.formed = None
        self.version = step
        return True

    def count(self, state: SlotState) -> int:
        """Number of slots in a state."""
        return sum(slot.state is state for slot in self.slots.values())

    def _oldest(self) -> list[Slot]:
        ready: list[Slot] = []
        for slot in self.slots.values():
            if slot.state is SlotState.TAKEN:
                continue
            if slot.state is SlotState.BUFFERED:
                ready.append(slot)
            elif self.on_stale == "wait":
                break
            if len(ready) == self.groups_per_step:
                break
        return ready

    def _is_stale(self, slot: Slot) -> bool:
        assert slot.group is not None
        sampled = slot.group.versions[slot.group.loss_mask != 0]
        return bool(sampled.size) and int(sampled.min()) < self.version - self.async_lag

    def _treat(self, stale: list[Slot]) -> None:
        """Apply on_stale. Under `wait` a stale token means that a guard failed: never train it."""
        for slot in stale:
            assert slot.group is not None
            if self.on_stale == "mask":
                self._mask(slot)
                continue
            again = slot.stale_retries == 0
            slot.group = None
            if again:
                slot.stale_retries += 1
                slot.state = SlotState.QUEUED
                # A second try starts with the newest weights, at the end of the order.
                self.slots.pop(slot.group_id)
                slot.min_version = self.next_min_version()
                self.slots[slot.group_id] = slot
                self.counters["stale_leased_again"] += 1
            else:
                self.drop(slot, "too_slow")

    def _mask(self, slot: Slot) -> None:
        group = slot.group
        assert group is not None
        over_age = (group.versions < self.version - self.async_lag) & (group.loss_mask != 0)
        slot.group = replace(group, loss_mask=np.where(over_age, np.uint8(0), group.loss_mask))
        self.counters["tokens_masked"] += int(over_age.sum())
