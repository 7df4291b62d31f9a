"""Leases: which prompt is at which rollout server, until when. No socket, no clock (time is an argument).

A slot is one admitted group: QUEUED → LEASED → BUFFERED (its group is here) → taken by a batch, and no slot.
An expired lease goes back to QUEUED with the next attempt number; the first valid result wins, of whichever attempt.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from replay.journal.format import Location
from replay.messages import Group

GroupId = tuple[int, int]

INTERRUPTIONS = frozenset({"expired", "server_lost", "aborted"})
"""Reasons for which a lease ends that say nothing about its prompt. Long answers meet more of them, so counting them
towards max_attempts would drop long prompts first."""
MAX_INTERRUPTIONS = 10
"""So many times max_attempts of them are too many: the prompt may be what ends its servers."""
WAIT_FOR_OTHERS_S = 1.0
"""How long leases are kept for rollout servers that have not announced the version that these need."""


class SlotState(Enum):
    """Where an admitted group is."""

    QUEUED = "queued"
    LEASED = "leased"
    BUFFERED = "buffered"


@dataclass(slots=True)
class Slot:
    """One admitted group. Example: group_id (0, 17), attempt 1, LEASED to 'rollout-0.4711' until 93.5."""

    group_id: GroupId
    row: dict[str, Any]
    min_version: int
    """Oldest policy version that may sample a token of this group (invariant 1)."""
    state: SlotState = SlotState.QUEUED
    attempt: int = 0
    server: str | None = None
    deadline: float = 0.0
    leased_at: float = 0.0
    begun_at: float | None = None
    """When it was leased first."""
    tokens: int = 0
    progress_at: float = 0.0
    """When the server last reported more tokens, or worked on others while this one waited for its turn."""
    stale_retries: int = 0
    failures: int = 0
    """Leases that ended because of the prompt itself."""
    interruptions: int = 0
    """Leases that ended for a reason in INTERRUPTIONS."""
    voided: int = 0
    """Attempts up to this one do not count any more: too old, or of policies that are not on the line."""
    group: Group | None = None
    location: Location | None = None
    """Of the group in the journal."""
    async_lag: int = 0
    """Bound of the lag when it was admitted; it counts while it is above the present one, which guards may lower."""

    _oldest: tuple[Group, float] | None = None

    def oldest_sampled(self) -> float:
        """Oldest version of a token in the loss of its group, looked up once; infinite where there is none."""
        assert self.group is not None
        if self._oldest is None or self._oldest[0] is not self.group:
            sampled = self.group.versions[self.group.loss_mask != 0]
            self._oldest = self.group, float(sampled.min()) if sampled.size else math.inf
        return self._oldest[1]

    def recall(self) -> None:
        """→ QUEUED: the prompt is sampled anew, and no answer of an attempt so far counts, whenever it comes."""
        self.group, self.location, self.server, self.state = None, None, None, SlotState.QUEUED
        self.voided = self.attempt


class Leases:
    """Moves slots between QUEUED and LEASED. The slots themselves belong to the buffer."""

    def __init__(self, lease_s: float, max_attempts: int) -> None:
        self.lease_s = self.quiet_s = lease_s
        """`quiet_s` is how long a lease is good for without a new token; with teachers, as long as these may take."""
        self.max_attempts = max_attempts

    def grant(self, slot: Slot, server: str, now: float) -> None:
        """QUEUED → LEASED, with the next attempt number."""
        assert slot.state is SlotState.QUEUED
        slot.state, slot.server, slot.tokens = SlotState.LEASED, server, 0
        slot.attempt += 1
        slot.leased_at = slot.progress_at = now
        slot.begun_at = now if slot.begun_at is None else slot.begun_at
        slot.deadline = now + self.lease_s

    def renew(
        self, slot: Slot, server: str, attempt: int, tokens: int, now: float, *, queued_behind: float | None = None
    ) -> bool:
        """Push the deadline of a lease that is still held; False when it is not (any more).

        Without a new token for `quiet_s`, scoring included, the deadline stays: a server whose engine hangs goes on
        renewing. Of a lease that waits for its turn, `queued_behind` is when its server sampled anything last.
        """
        if slot.state is not SlotState.LEASED or slot.server != server or slot.attempt != attempt:
            return False
        if tokens != slot.tokens:
            slot.tokens, slot.progress_at = tokens, now
        elif queued_behind is not None:
            slot.progress_at = max(slot.progress_at, queued_behind)
        slot.deadline = min(now, slot.progress_at + self.quiet_s) + self.lease_s
        return True

    def release(self, slot: Slot, reason: str) -> None:
        """LEASED → QUEUED, counted as the prompt's failure or as an interruption."""
        assert slot.state is SlotState.LEASED
        slot.state, slot.server = SlotState.QUEUED, None
        if reason in INTERRUPTIONS:
            slot.interruptions += 1
        else:
            slot.failures += 1

    def exhausted(self, slot: Slot) -> str | None:
        """Why a slot must be dropped instead of leased again: poison or interrupted."""
        if slot.failures >= self.max_attempts:
            return "poison"
        return "interrupted" if slot.interruptions >= MAX_INTERRUPTIONS * self.max_attempts else None

    @staticmethod
    def expired(slots: Iterable[Slot], now: float) -> Iterator[Slot]:
        return (slot for slot in slots if slot.state is SlotState.LEASED and slot.deadline <= now)


class Shares:
    """How many leases one server may hold while others have not announced the version that the next ones need.

    What a commit frees needs the version that it has made: the first server that serves it would get all of it, a
    moment before the others, however many they are.
    """

    def __init__(self) -> None:
        self._needed, self._since = -1, 0.0
        """The version, and since when some server has it."""

    def most(self, versions: Sequence[int], *, needed: int, work: int, now: float) -> int:
        """Of one server: its part of `work` (leases held or possible) for WAIT_FOR_OTHERS_S, afterwards all of it.

        `versions` has one number for each server; the next lease needs `needed`.
        """
        ready = sum(version >= needed for version in versions)
        if ready and needed != self._needed:
            self._needed, self._since = needed, now
        if ready in (0, len(versions)) or now - self._since > WAIT_FOR_OTHERS_S:
            return work
        return -(-work // len(versions))
