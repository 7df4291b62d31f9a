"""The members of the weight bus, their states, and the groups that they form. No socket, no clock: time is an argument.

    WAITING ──invite──▶ INVITED ──ready──▶ READY ──begin──▶ RECEIVING ──commit──▶ APPLYING ──verified──▶ LIVE
       ▲                   │                 │                  │                     │                   │
       └───── release ─────┴─────────────────┴──────────────────┘                     └─▶ QUARANTINED     │
       └───────────────────────────── a newer version, or a refill (invite) ◀─────────────────┴───────────┘

APPLYING ──holding──▶ HOLDING ──verified──▶ LIVE: an engine that finishes an evaluation of an older version first.
It is not waited for meanwhile, and counts as slow only after the time that it has asked for. One that goes on staging
receives newer versions with its group (begin), each in the place of the one that it has not applied.

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
"""Under way, with the engine as it was."""
ENGAGED = (State.APPLYING, State.HOLDING)


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
    stages: bool = False  # while it is HOLDING, it receives newer versions

    def __str__(self) -> str:
        return f"subscriber {self.name!r} (pid {self.pid}, {self.host})"

    @property
    def is_free(self) -> bool:
        """Whether it can receive a version."""
        return self.state in IDLE or (self.state is State.HOLDING and self.stages)

    def has(self, version: int) -> bool:
        """Whether it serves a version, or that is on its way into the engine."""
        return self.version == version or (self.target == version and self.state in (*UNTOUCHED, *ENGAGED))


@dataclass(slots=True)
class Group:
    """Members that receive together in one epoch."""

    epoch: int = 0
    sessions: tuple[str, ...] = ()
    """By rank from 1; empty when it is broken."""
    suspects: frozenset[str] = frozenset()
    """Of the last one, where it broke: any of them may have broken it."""


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
        self.epoch = 0  # the last one that was begun, of any group
        self.main, self.beside = Group(), Group()
        """Those that new versions are sent to; and newcomers and late ones, which are filled beside them."""
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
        idle = [m for m in self.members.values() if m.is_free and not m.has(version) and now >= m.retry_at]
        fewest = min((m.faults for m in idle), default=0)
        return [m for m in idle if m.faults == fewest]

    def next_round(self, version: int, now: float) -> tuple[Group, list[Member]]:
        """To whom `version` is to be sent next, and as which group; nobody where all have it, or are busy.

        Who comes when others have the version already is filled beside them. Later versions go to the main group as it
        is, and then to those beside it, however many come, until the main group's next epoch: when it has lost a
        member, or when half of all are beside it and every version would be sent twice to as many.
        """
        needing = self.needing(version, now)
        if any(member.has(version) for member in self.members.values()):
            return self.beside, needing
        main = set(self.main.sessions)
        inside = [member for member in needing if member.session in main]
        goes_on = len(inside) == len(main) > len(needing) - len(inside)
        return self.main, inside if goes_on else needing

    def unsettled(self, version: int) -> list[Member]:
        """Members that do not serve `version` yet and are waited for."""
        served = State.LIVE, version
        return [m for m in self.members.values() if m.state is not State.HOLDING and (m.state, m.version) != served]

    def held(self) -> list[Member]:
        """Members that hold an older version, with leave."""
        return [m for m in self.members.values() if m.state is State.HOLDING]

    def invite(self, group: Group, members: Iterable[Member], now: float, deadline: float) -> int:
        """Free → INVITED in the group's next epoch, whose number it returns. What they were in ends here."""
        self.epoch += 1
        group.epoch, group.sessions = self.epoch, ()
        for member in members:
            assert member.is_free, member.state
            self.break_group(member.session)
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

    def begin(
        self, group: Group, members: Sequence[Member], target: tuple[int, str], now: float, deadline: float
    ) -> None:
        """READY, or free in the formed group → RECEIVING of (version, digest), as the group."""
        for member in members:
            assert member.state is State.READY or (member.is_free and member.session in group.sessions), member.state
            self._move(member, State.RECEIVING, now, deadline)
            member.target, member.expected = target
            member.base = ""  # what it has staged is written over
            member.epoch = group.epoch
        group.sessions = tuple(member.session for member in members)

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
            member.hold, member.stages = holding.reason, holding.stages
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
        self.break_group(member.session)
        if not rejoin:
            _remember(self._fenced, member.instance, True)

    def break_group(self, session: str) -> int:
        """The group that this one is in is unusable: the next update starts an epoch. How many were in it."""
        for group in (self.main, self.beside):
            if session in group.sessions:
                size, group.sessions = len(group.sessions), ()
                return size
        return 0

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
