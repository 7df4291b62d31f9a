"""What the publisher answers its subscribers: joins, what became of versions, heartbeats and removals. No thread.

Used by the bus thread (bus.py), which serves the control plane with `pump` whatever it waits for.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from configs.infrastructure import WeightBus
from replay.channel import Envelope, WireError, shown
from weight_bus import messages as m
from weight_bus.control import Router
from weight_bus.errors import BusClosed, WeightBusError
from weight_bus.membership import ENGAGED, Member, State
from weight_bus.offer import Board
from weight_bus.senders import Senders
from weight_bus.transports.base import differing

log = logging.getLogger(__name__)

MAX_HOLD_S = 24 * 3600.0  # no engine is given more


class Coordinator:
    """Reads the ROUTER socket and changes the membership by what it hears.

    Args:
        facts: what a subscriber's transport must have in common with the publisher's.
    """

    def __init__(
        self,
        config: WeightBus,
        *,
        router: Router,
        board: Board,
        facts: dict[str, str],
        incarnation: int,
        senders: Senders,
    ) -> None:
        self._config, self._router, self._board = config, router, board
        self._facts, self._incarnation, self._senders = facts, incarnation, senders
        self._membership = board.membership
        self._next_beat = 0.0
        self._accused: list[tuple[Member, str]] | None = None

    def pump(self, until: Callable[[], bool], deadline: float) -> None:
        """Serve the control plane until a condition holds or the deadline has passed. Raises BusClosed."""
        while True:
            if self._board.closing:
                raise BusClosed(self._board.closing)
            now = time.monotonic()
            if until() or now >= deadline:
                return
            arrived = self._router.poll(min(deadline, self._next_beat) - now)
            with self._board.changed:
                for identity, envelope in arrived:
                    self._handle(identity, envelope, time.monotonic())
                self._tend(time.monotonic())
                self._board.settle(time.monotonic())

    def _tend(self, now: float) -> None:
        """Send heartbeats, and remove members that are silent or slow. After reading what has arrived, never before."""
        if now >= self._next_beat:
            self._next_beat = now + self._config.heartbeat_s
            for member in list(self._membership.members.values()):
                self.reach(member)
            self._senders.remind(now)
        for member, symptom, seconds in self._membership.overdue(now):
            self._lose(member, f"{symptom} for {seconds:.1f} s", symptom)

    def reach(self, member: Member) -> bool:
        """Send a heartbeat to a member; without a connection it is removed at once."""
        symptom = self._router.send(member.identity, m.Heartbeat(session=member.session))
        if symptom:
            self._lose(member, "its connection is gone" if symptom == "closed" else "does not read", symptom)
        return not symptom

    def _lose(self, member: Member, why: str, symptom: str, *, rejoin: bool = True) -> None:
        """Remove a member, name it in the log and in the report of the current version."""
        with self._board.changed:
            offer, version, epoch = self._board.current, self._board.version, self._membership.epoch
            quiet = time.monotonic() - member.heard_at
            earlier = offer.failed.get(member.name) if offer is not None else None
            before = f"; before: {earlier}" if earlier is not None else ""
            doing = f"{member.state.value} v{member.target}" if member.state in ENGAGED else member.state.value
            doing = f"{self._board.doing} v{member.target}" if member.state is State.RECEIVING else doing
            reason = f"{why} while {doing}, last heartbeat {quiet:.1f} s ago{before} [{symptom}]"
            log.warning("weight bus: v%d epoch %d: %s %s; removed", version, epoch, member, reason)
            self._router.send(member.identity, m.Removed(session=member.session, reason=reason, rejoin=rejoin))
            self._membership.remove(member, rejoin=rejoin)
            self._board.counters["lost_peers"] += 1
            if offer is not None and member.version != version:
                offer.fail(member.name, reason, symptom)
            self._board.emit("removed", version, member.name, reason, symptom)

    def _handle(self, identity: str, envelope: Envelope | WireError, now: float) -> None:
        if isinstance(envelope, WireError):
            log.warning("weight bus: refused a message of %r: %s [corrupt]", shown(identity), envelope)
            return
        message = envelope.message
        assert isinstance(message, m.InSession)  # as all of TO_PUBLISHER
        if isinstance(message, m.Enlist | m.Sent):
            self._senders.hear(identity, message)
            return
        if isinstance(message, m.Join):
            self._on_join(identity, message, envelope, now)
            return
        session = message.session
        member = self._membership.heard(session, identity, now)
        if member is None:
            if not isinstance(message, m.Goodbye):
                # also for a subscriber that was stopped and continues: it joins anew and is refilled
                self._router.send(identity, m.Removed(session=session, reason="this session has ended", rejoin=True))
            return
        match message:
            case m.EpochReady():
                self._membership.ready(session, message.epoch, now)
            case m.Staged():
                self._on_staged(message, now)
            case m.Applied():
                self._on_applied(member, message, now)
            case m.Holding():
                self._on_holding(message, now)
            case m.ReceiveFailed():
                self._on_receive_failed(message, now)
            case m.Goodbye():
                log.info("weight bus: %s leaves: %s", member, message.reason)
                self._membership.remove(member, rejoin=True)
                self._board.emit("left", self._board.version, member.name, message.reason)

    def _on_join(self, identity: str, join: m.Join, envelope: Envelope, now: float) -> None:
        board, offer, run_id = self._board, self._board.current, envelope.run_id
        version, digest = (offer.version, offer.digest) if offer is not None else (-1, "")
        known = self._membership.find(join.session) is not None
        if run_id != self._router.run_id:
            reason = f"this is run {self._router.run_id!r}, not {run_id!r}; check the address of the weight bus"
            self._refuse(identity, join.session, reason, run_id)
            return
        if apart := differing(self._facts, join.facts):
            reason = f"{join.name!r} on {join.host} cannot be in a group with the publisher: {apart}"
            self._refuse(identity, join.session, reason)
            return
        sender = envelope.sender
        admission = self._membership.join(join, identity, now, version=version, digest=digest, sender=sender)
        member, old = admission.member, admission.replaced
        if member is None:
            self._refuse(identity, join.session, admission.refused)
            return
        if old is not None and old.instance != join.instance:
            reason = f"a newer {old} joined as pid {join.pid} on {join.host} [duplicate]"
            self._refuse(old.identity, old.session, reason)
            board.counters["lost_peers"] += 1
        self._router.send(identity, m.Welcome(session=join.session, incarnation=self._incarnation, version=version))
        if not known:
            board.counters["joins"] += 1
            log.info("weight bus: %s joined, it holds v%d", member, join.version)
            board.emit("join", version, member.name)

    def _refuse(self, identity: str, session: str, reason: str, run_id: str = "") -> None:
        """End a session for good."""
        log.warning("weight bus: refused: %s", reason)
        self._router.send(identity, m.Removed(session=session, reason=reason, rejoin=False), run_id)

    def _on_staged(self, staged: m.Staged, now: float) -> None:
        board, offer = self._board, self._board.current
        session, epoch, version = staged.session, staged.epoch, staged.version
        member = self._membership.receiving(session, epoch, version)
        if member is None or offer is None:
            return
        off = version == board.called_off[1] and epoch <= board.called_off[0]
        if off or (not staged.corrupt and version != offer.version):
            reason = "called off" if off else f"superseded by v{offer.version}"
            self._router.send(member.identity, m.Abort(session=session, epoch=epoch, version=version, reason=reason))
            self._membership.release(member, now)
            return
        self._membership.staged(staged, now, now + self._config.deadline_s)
        for phase, seconds in (("wire", staged.wire_s), ("verify", staged.verify_s)):
            offer.seconds[phase] = max(offer.seconds.get(phase, 0.0), seconds)
        offer.staged_at = now
        if staged.corrupt:
            board.counters["corrupt"] += 1
            self._faulty(member, "corrupt", f"v{version}: received corrupt tensors: {_named(staged.corrupt)} [corrupt]")
        else:
            commit = m.Commit(session=session, epoch=epoch, version=version, digest=member.expected)
            self._router.send(member.identity, commit)

    def _on_applied(self, member: Member, applied: m.Applied, now: float) -> None:
        board, faults = self._board, member.faults
        if self._membership.applied(applied, now) is None:
            return
        if member.state is State.LIVE:
            if faults:
                board.counters["heals"] += 1
                log.info("weight bus: v%d: %s is healed", applied.version, member)
                board.emit("healed", board.version, member.name)
            board.emit("live", board.version, member.name)
        else:
            board.counters["quarantines"] += 1
            reason = applied.reason or f"the engine holds wrong tensors: {_named(applied.differences)}"
            self._faulty(member, "quarantined", f"v{applied.version}: quarantined: {reason} [corrupt]")

    def _on_holding(self, holding: m.Holding, now: float) -> None:
        version, limit_s, reason = holding.version, min(holding.limit_s, MAX_HOLD_S), holding.reason
        if not limit_s > 0:
            log.warning("weight bus: v%d: a hold of %r s is refused [corrupt]", version, limit_s)
            return
        member = self._membership.holding(replace(holding, limit_s=limit_s), now)
        if member is not None:
            log.info("weight bus: v%d waits for %s, at most %.0f s: %s", version, member, limit_s, reason)
            self._board.emit("held", self._board.version, member.name, reason)

    def _on_receive_failed(self, failed: m.ReceiveFailed, now: float) -> None:
        what = (failed.session, failed.epoch, failed.version)
        member = self._membership.receiving(*what)
        if member is None:
            said = (self._membership.find(failed.session) or failed.session, failed.reason)
            log.info("weight bus: v%d epoch %d: %s, afterwards: %s", failed.version, failed.epoch, *said)
            return
        alone = self._membership.break_group(member.session) == 1
        self._membership.release(member, now)
        log.warning("weight bus: v%d epoch %d: %s: %s", failed.version, failed.epoch, member, failed.reason)
        if alone and self._accused is not None:
            self._accused.append((member, failed.reason))
        elif alone:
            self.charge(member, failed.reason)

    @contextmanager
    def adjourned(self) -> Iterator[list[tuple[Member, str]]]:
        """An only receiver that fails meanwhile is not charged but listed: the sender may be at fault."""
        accused: list[tuple[Member, str]] = []
        self._accused = accused
        try:
            yield accused
        finally:
            self._accused = None

    def charge(self, member: Member, reason: str) -> None:
        """Count a failed broadcast against the only receiver it had, which is tried again after a pause."""
        with self._board.changed:
            if self._membership.find(member.session) is not member:
                return  # it was lost meanwhile
            pause = self._config.heartbeat_s * 2.0**member.faults
            self._membership.fault(member, time.monotonic() + pause)
            self._faulty(member, "failed", reason)

    def _faulty(self, member: Member, kind: str, reason: str) -> None:
        """One fault more: it is refilled by the next round, or removed when it has had its refills.

        Raises WeightBusError: no other receives the version, either, and so the sender is at fault.
        """
        offer, limit = self._board.current, self._config.max_heals
        if offer is not None:
            offer.fail(member.name, reason)
        self._board.emit(kind, self._board.version, member.name, reason)
        if self._membership.hopeless(member):
            others = [other for other in self._membership.members.values() if other is not member]
            if kind != "quarantined" and others and all(o.faults and not o.has(self._board.version) for o in others):
                raise WeightBusError(
                    f"v{self._board.version} reaches none of {len(others) + 1} engines, last {member}: {reason}"
                )
            self._lose(member, f"failed {member.faults} updates in a row, last: {reason},", "corrupt", rejoin=False)
        else:
            log.warning("weight bus: %s %s; refill %d of %d", member, reason, member.faults, limit)

    def say_goodbye(self, reason: str) -> None:
        for member in self._membership.members.values():
            self._router.send(member.identity, m.Goodbye(session=member.session, reason=reason))


def _named(tensors: list[str]) -> str:
    return ", ".join(tensors[:5]) + (" and more" if len(tensors) > 5 else "")
