"""The members of the weight bus, their states, and the epoch that they form. No socket, no clock: time is an argument.

    WAITING ──invite──▶ INVITED ──ready──▶ READY ──begin──▶ RECEIVING ──commit──▶ APPLYING ──verified──▶ LIVE
       ▲                   │                 │                  │                     │                   │
       └───── release ─────┴─────────────────┴──────────────────┘                     └─▶ QUARANTINED     │
       └───────────────────────────── a newer version, or a refill (invite) ◀─────────────────┴───────────┘

APPLYING ──holding──▶ HOLDING ──verified──▶ LIVE: an engine that finishes an evaluation of an older version first.
It is not waited for meanwhile, and counts as slow only after the time that it has asked for.

`remove` ends a session, and its later messages are ignored.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from weight_bus.messages import Applied, Holding, Join, Staged

V = TypeVar("V")
MAX_FENCED = 1024


class State(Enum):
    """Where a member is in the protocol. The value is what logs say it is doing."""

    WAITING = "waiting for weights"
    INVITED = "entering the epoch"
    READY = "ready for the epoch"
    RECEIVING = "receiving"
    APPLYING = "applying"
    HOLDING = "holding an older version before it applies"
    LIVE = "live"
    QUARANTINED = "quarantined"


IDLE = (State.WAITING, State.LIVE, State.QUARANTINED)
UNTOUCHED = (State.INVITED, State.READY, State.RECEIVING)
"""Engaged, with the engine as it was."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One subscriber of this session. Only Membership changes it."""

    name: str
    session: str
    instance: str
    identity: str
    sender: str  # name of the key that it has proven, "" without keys
    pid: int
    host: str
    since: float  # when the present state began
    heard_at: float
    state: State = State.WAITING
    deadline: float = math.inf  # when the present state has lasted too long
    epoch: int = 0  # last epoch it was invited to
    version: int = -1  # version that it verifiably serves, -1 for none
    target: int = -1  # version on its way to it, with the digest `expected`
    expected: str = ""
    base: str = ""  # digest of the version whose bytes it has beside its engine, proven; empty while that is not known
    layout: str = ""  # id of the layout that it was sent last
    faults: int = 0  # failed updates since the last verified one
    retry_at: float = -math.inf  # not sent anything before this time
    hold: str = ""  # why it is HOLDING

    def __str__(self) -> str:
        return f"subscriber {self.name!r} (pid {self.pid}, {self.host})"


@dataclass(frozen=True, slots=True)
class JoinResult:
    """Answer to a Join: a member and the one that it replaced, or why it is refused."""

    member: Member | None = None
    replaced: Member | None = None
    refused: str = ""


class Membership:
    """The members of a publisher: silent after `silent_after_s`, healing from `max_faults` failed updates in a row."""

    def __init__(self, *, silent_after_s: float, max_faults: int) -> None:
        self.members: dict[str, Member] = {}
        self._by_session: dict[str, Member] = {}
        self.epoch = 0
        self.group: tuple[str, ...] = ()
        """Sessions of the group that is formed now, by rank from 1; empty when it is broken."""
        self.silent_after_s = silent_after_s
        self._max_faults = max_faults
        # instances that must not come back: replaced by a namesake, or removed for good
        self._fenced: dict[str, bool] = {}
        # outlives a session, so that leaving and joining anew does not reset the count
        self._faults: dict[str, int] = {}

    def join(self, join: Join, identity: str, now: float, *, version: int, digest: str, sender: str = "") -> JoinResult:
        """Admit a subscriber while `version` with `digest` is published. The newest instance of a name wins; while
        a name has a member, only the key of that one (`sender`) may join under it."""
        if join.instance in self._fenced:
            reason = f"another instance of {join.name!r} has taken its place, or it was removed for good"
            return JoinResult(refused=reason)
        owner = self._by_session.get(join.session)
        if owner is not None and owner.name != join.name:
            return JoinResult(refused=f"session {join.session!r} is that of {owner.name!r}")
        old = self.members.get(join.name)
        if old is not None and old.sender != sender:
            return JoinResult(refused=f"the name {join.name!r} belongs to key {old.sender!r}, not to {sender!r}")
        if old is not None and old.session == join.session:
            old.heard_at = now
            return JoinResult(member=old)
        if old is not None:
            self.remove(old, rejoin=old.instance == join.instance)
        member = Member(
            name=join.name,
            session=join.session,
            instance=join.instance,
            identity=identity,
            sender=sender,
            pid=join.pid,
            host=join.host,
            since=now,
            heard_at=now,
            faults=self._faults.get(join.instance, 0),
        )
        if version >= 0 and (join.version, join.digest) == (version, digest):
            member.state, member.version = State.LIVE, version
        self.members[join.name] = self._by_session[join.session] = member
        return JoinResult(member=member, replaced=old)

    def find(self, session: str) -> Member | None:
        """The member of a session; None when the session has ended."""
        return self._by_session.get(session)

    def heard(self, session: str, identity: str, now: float) -> Member | None:
        """Note a sign of life of the member, if the session has not ended and is this identity's."""
        member = self.find(session)
        if member is None or member.identity != identity:
            return None
        member.heard_at = now
        return member

    def needing(self, version: int, now: float) -> list[Member]:
        """Idle members that do not serve `version`, of those only the ones with the fewest faults, oldest first."""
        # a member that keeps failing must not take a healthy one down with it in the same group
        idle = [m for m in self.members.values() if m.state in IDLE and m.version != version and now >= m.retry_at]
        fewest = min((m.faults for m in idle), default=0)
        return [m for m in idle if m.faults == fewest]

    def unsettled(self, version: int) -> list[Member]:
        """Members that do not serve `version` yet and are waited for."""
        served = State.LIVE, version
        return [m for m in self.members.values() if m.state is not State.HOLDING and (m.state, m.version) != served]

    def held(self) -> list[Member]:
        """Members that hold an older version, with leave."""
        return [m for m in self.members.values() if m.state is State.HOLDING]

    def invite(self, members: Iterable[Member], now: float, deadline: float) -> int:
        """IDLE → INVITED in the next epoch, whose number it returns. The formed group ends here."""
        self.epoch += 1
        self.group = ()
        for member in members:
            assert member.state in IDLE, member.state
            self._move(member, State.INVITED, now, deadline)
            member.epoch = self.epoch
        return self.epoch

    def ready(self, session: str, epoch: int, now: float) -> bool:
        """INVITED → READY. False for an answer to an older epoch."""
        member = self.find(session)
        if member is None or (member.state, member.epoch) != (State.INVITED, epoch):
            return False
        self._move(member, State.READY, now)
        return True

    def begin(self, members: Sequence[Member], target: tuple[int, str], now: float, deadline: float) -> None:
        """READY, or IDLE in the formed group → RECEIVING of (version, digest), as the group."""
        for member in members:
            assert member.state is State.READY or member.session in self.group, member.state
            self._move(member, State.RECEIVING, now, deadline)
            member.target, member.expected = target
            member.base = ""  # what it has staged is written over
            member.epoch = self.epoch
        self.group = tuple(member.session for member in members)

    def uninformed(self, members: Iterable[Member], layout: str) -> list[Member]:
        """Those that were not sent this layout yet; it counts as sent from now on."""
        found = [member for member in members if member.layout != layout]
        for member in found:
            member.layout = layout
        return found

    def receiving(self, session: str, epoch: int, version: int) -> Member | None:
        """The member that is RECEIVING exactly this; None for late messages."""
        return self._in(session, epoch, version, State.RECEIVING)

    def staged(self, staged: Staged, now: float, deadline: float) -> Member | None:
        """RECEIVING → APPLYING when whole, → WAITING with a fault when corrupt. None for late messages."""
        member = self.receiving(staged.session, staged.epoch, staged.version)
        if member is None:
            return None
        if staged.corrupt:
            self._move(member, State.WAITING, now)
            self.fault(member)
        else:
            # from here until Applied the engine may hold anything
            member.version = -1
            member.base = member.expected
            self._move(member, State.APPLYING, now, deadline)
        return member

    def applied(self, applied: Applied, now: float) -> Member | None:
        """APPLYING or HOLDING → LIVE with the expected digest, else → QUARANTINED. None for late messages."""
        member = self._in(applied.session, applied.epoch, applied.version, State.APPLYING, State.HOLDING)
        if member is None:
            return None
        if not applied.differences and applied.digest == member.expected:
            self._move(member, State.LIVE, now)
            member.version = member.target
            member.faults = 0
            self._faults.pop(member.instance, None)
        else:
            self._move(member, State.QUARANTINED, now)
            self.fault(member)
        return member

    def holding(self, holding: Holding, now: float) -> Member | None:
        """APPLYING or HOLDING → HOLDING, slow only after `limit_s` from now. None for late messages."""
        member = self._in(holding.session, holding.epoch, holding.version, State.APPLYING, State.HOLDING)
        if member is not None:
            self._move(member, State.HOLDING, now, now + holding.limit_s)
            member.hold = holding.reason
        return member

    def release(self, member: Member, now: float, retry_at: float = -math.inf) -> None:
        """UNTOUCHED → WAITING: it serves what it served."""
        assert member.state in UNTOUCHED, member.state
        self._move(member, State.WAITING, now)
        member.retry_at = retry_at
        member.layout = ""  # it may not have come, either

    def fault(self, member: Member, retry_at: float = -math.inf) -> None:
        """Count a failed update; the next try is at `retry_at` or later."""
        member.faults += 1
        member.retry_at = retry_at
        _remember(self._faults, member.instance, member.faults)

    def hopeless(self, member: Member) -> bool:
        """Whether a member has used up its refills."""
        return member.faults > self._max_faults

    def overdue(self, now: float) -> list[tuple[Member, str, float]]:
        """Members that are silent, or too slow in their state: (member, symptom, seconds)."""
        silent = [m for m in self.members.values() if now - m.heard_at > self.silent_after_s]
        slow = [m for m in self.members.values() if now > m.deadline and m not in silent]
        return [(m, "silent", now - m.heard_at) for m in silent] + [(m, "slow", now - m.since) for m in slow]

    def remove(self, member: Member, *, rejoin: bool) -> None:
        """End a session. Without `rejoin` its instance is fenced for good."""
        del self.members[member.name], self._by_session[member.session]
        if member.session in self.group:
            self.group = ()
        if not rejoin:
            _remember(self._fenced, member.instance, True)

    def break_group(self) -> None:
        """The formed group is unusable; the next update starts an epoch."""
        self.group = ()

    def in_group(self, members: Iterable[Member]) -> bool:
        """Whether exactly these members form the present group."""
        return bool(self.group) and self.group == tuple(member.session for member in members)

    def _in(self, session: str, epoch: int, version: int, *states: State) -> Member | None:
        """The member of a session that is in one of these states for exactly this version in this epoch."""
        member = self.find(session)
        if member is None or member.state not in states or (member.epoch, member.target) != (epoch, version):
            return None
        return member

    def _move(self, member: Member, state: State, now: float, deadline: float = math.inf) -> None:
        member.state, member.since, member.deadline = state, now, deadline


def _remember(table: dict[str, V], instance: str, value: V) -> None:
    """As the last of at most MAX_FENCED instances."""
    table.pop(instance, None)
    table[instance] = value
    while len(table) > MAX_FENCED:
        del table[next(iter(table))]
