"""The bus thread of the publisher: rounds of updates, without the learner's main thread.

consumes:     packed updates from the board, messages of subscribers
produces:     rounds of buckets, Commit and Abort, reports on the board
waits for:    subscribers (silence, slowness and the collective timeout bound every wait)
unblocked by: a message, a packed update, a heartbeat period, close()

A round sends the version on offer to members that need it, in the group of one epoch. The members of the last epoch use
its group again; any other set forms the next epoch, of exactly those that answer for it. Newcomers and late members
have a group of their own, beside the main one.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from configs.infrastructure import WeightBus
from weight_bus.control import Router, wake_quickly
from weight_bus.coordinator import Coordinator
from weight_bus.delta.changes import Change
from weight_bus.errors import BusClosed, FolderFull, NotPacked, SenderBroken, TransportError, WeightBusError
from weight_bus.lanes import Lane, first_of, joined
from weight_bus.membership import Group, Member, State
from weight_bus.messages import Abort, Begin, Epoch, Send, described, digest_array
from weight_bus.offer import VERIFYING, Board, Offer
from weight_bus.sender import Parcel, Sender, limit_s
from weight_bus.senders import Senders
from weight_bus.transports.base import Formation, Transport, group_prefix

log = logging.getLogger(__name__)


class Bus:
    """Started by Publisher; ends with `board.closing`.

    Args:
        transports: one for each lane that this process sends.
        lanes: of all learner ranks; none where rank 0 sends whole tensors to one member of each engine.
        sender_session: by which the senders of other ranks are known.
    """

    def __init__(
        self,
        config: WeightBus,
        *,
        router: Router,
        board: Board,
        transports: Sequence[Transport],
        another: Callable[[], Transport],
        incarnation: int,
        lanes: Sequence[Lane],
        sender_session: str,
    ) -> None:
        self._config, self._router, self._board, self._incarnation = config, router, board, incarnation
        self._membership, self._lanes = board.membership, lanes
        mine = [lane for lane in lanes if lane.sender == 0]
        self._sources = joined([lane.layout for lane in mine]).sources if mine else ()
        self._sender = Sender(
            transports,
            another,
            mine,
            config.collective_timeout_s,
            doing=self._doing,
            closing=lambda: board.closing,
            done=self._sent,
        )
        facts = transports[0].facts()
        self._senders = Senders(router, lanes, sender_session, facts, self._sender.endpoints, config.deadline_s)
        self._coordinator = Coordinator(
            config, router=router, board=board, facts=facts, incarnation=incarnation, senders=self._senders
        )
        self._rest_until = 0.0
        """No round before: a learner rank is late with its packing, or its end was broken."""
        self._broken_since = 0.0
        """No round has passed since then, for a learner rank's end was broken; 0: none was."""
        self.thread = threading.Thread(target=self._run, name="weight-bus", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        wake_quickly()
        try:
            while True:
                self._take_up()
                group, receivers = self._next_round()
                if receivers:
                    self._round(group, receivers)
                else:
                    due = time.monotonic() + self._config.heartbeat_s
                    self._coordinator.pump(lambda: bool(self._board.pending or self._next_round()[1]), due)
        except BusClosed as closed:
            self._say_goodbye(str(closed))
        except Exception as error:
            log.exception("weight bus: the publisher's thread failed")
            with self._board.changed:
                self._board.failure = error
                self._board.changed.notify_all()
            self._say_goodbye(f"the publisher failed: {error}")
        finally:
            self._sender.close()
            self._router.close()

    def _say_goodbye(self, reason: str) -> None:
        self._coordinator.say_goodbye(reason)
        self._senders.say_goodbye(reason)

    def _doing(self, what: str) -> None:
        self._board.doing = what

    def _sent(self) -> None:
        self._board.doing = VERIFYING
        self._router.wake()

    def _take_up(self) -> None:
        """The newest update becomes the current one; what the last one still owed is named in its report."""
        now = time.monotonic()
        with self._board.changed:
            pending, last = self._board.pending, self._board.current
            if pending is not None:
                if last is not None and last.report is None:
                    self._board.supersede(last, pending.version, now)
                pending.seconds["queue"] = now - pending.posted_at
                self._board.pending, self._board.current = None, pending
            self._board.settle(now)

    def _next_round(self) -> tuple[Group, list[Member]]:
        with self._board.changed:
            offer = self._board.current
            if offer is None or offer.progress.stalled or time.monotonic() < self._rest_until:
                return self._membership.main, []
            return self._membership.next_round(offer.version, time.monotonic())

    # ---- a round ----

    def _round(self, group: Group, receivers: list[Member]) -> None:
        """Send the current version to members that are free, once. Failures end in other states of the members."""
        offer = self._board.current
        assert offer is not None
        with self._board.changed:
            receivers = [member for member in receivers if self._coordinator.reach(member)]
        started = time.monotonic()
        self._wait_for_senders()
        fresh = group.sessions != tuple(member.session for member in receivers)
        if fresh and receivers:
            receivers = self._form(offer, group, receivers)
        if not receivers:
            return
        offer.spend("epoch", started)
        started = offer.sending_since = time.monotonic()
        parcel = self._begin(offer, group, receivers)
        if parcel is None:
            return
        with self._coordinator.adjourned() as failed:
            error = self._transmit(offer, parcel, group, fresh=fresh)
        offer.sent_at, offer.sending_since = offer.spend("send", started), 0.0
        group.suspects = frozenset()
        if error is None:
            self._broken_since = 0.0
            self._board.emit("sent", offer.version)
        else:
            failed += [(member, str(error)) for member in self._abort(offer, group, receivers, error)]
        if self._is_senders(error):
            return
        if error is not None:
            group.suspects = frozenset(member.session for member in receivers)
        if failed and len(receivers) == 1:
            self._coordinator.charge(*failed[0])

    def _wait_for_senders(self) -> None:
        """Until those of other learner ranks are there. Raises WeightBusError: some do not come."""
        self._coordinator.pump(lambda: not self._senders.missing, time.monotonic() + self._config.deadline_s)
        if missing := self._senders.missing:
            ranks = ", ".join(map(str, missing))
            raise WeightBusError(f"no sender of learner rank {ranks} in {self._config.deadline_s:.0f} s [silent]")

    def _form(self, offer: Offer, group: Group, invited: list[Member]) -> list[Member]:
        """Invite members to the group's next epoch; those that answer."""
        # a survivor of a broken group may sit in its own collective timeout meanwhile
        patience = self._config.collective_timeout_s + 2 * self._config.heartbeat_s
        membership, now = self._membership, time.monotonic()
        with self._board.changed:
            epoch = membership.invite(group, invited, now, now + patience)
            self._board.counters["epochs"] += 1
            names = [member.name for member in invited]
            for member in invited:
                self._router.send(member.identity, Epoch(session=member.session, epoch=epoch, members=names))

        def present(state: State) -> list[Member]:
            return [m for m in invited if m.state is state and membership.find(m.session) is m]

        # members that are silent, or have not answered when the patience is over, are removed meanwhile
        until = time.monotonic() + patience + self._config.heartbeat_s
        self._coordinator.pump(lambda: not present(State.INVITED), until)
        with self._board.changed:
            ready = present(State.READY)
            if len(ready) > 1 and frozenset(m.session for m in ready) == group.suspects:
                # all live and yet their round failed: one at a time shows which data plane is broken
                for member in ready[1:]:
                    membership.release(member, time.monotonic())
                ready = ready[:1]
        verb = "resends" if any(member.name in offer.failed for member in ready) else "sends"
        detail = ", ".join(member.name for member in ready)
        log.info("weight bus: epoch %d (%s) %s v%d", epoch, detail or "nobody", verb, offer.version)
        self._board.emit("epoch", offer.version, detail=detail)
        return ready

    def _begin(self, offer: Offer, group: Group, receivers: list[Member]) -> Parcel | None:
        """Announce the version to every receiver; None when it was called off meanwhile."""
        now = time.monotonic()
        with self._board.changed:
            if offer.progress.called_off:
                for member in receivers:
                    if member.state is State.READY:
                        self._membership.release(member, now)
                return None
            parcel = self._parcel(offer, receivers)
            target = offer.version, offer.digest
            self._membership.begin(group, receivers, target, now, now + self._config.deadline_s)
            self._board.counters["rounds"] += 1
            self._announce(offer, parcel.change, group, receivers)
        return parcel

    def _parcel(self, offer: Offer, receivers: list[Member]) -> Parcel:
        """The change since the version before where every receiver has that one staged, else all of it."""
        pieces, change = offer.buckets, offer.change
        offer.wire_bytes = sum(manifest.layout.num_bytes for manifest in offer.manifests)
        if change is not None and all(member.base == change.base for member in receivers):
            pieces = change.pieces(self._config.bucket_bytes)
            offer.wire_bytes = sum(piece.numel() for piece in pieces)
            self._board.counters["changes"] += 1
        else:
            change = None
        sources = self._sources or [(0, index) for index in range(len(pieces))]
        return Parcel(offer.version, pieces, sources, offer.progress, offer.manifest.layout, change)

    def _announce(self, offer: Offer, change: Change | None, group: Group, receivers: Sequence[Member]) -> None:
        """Send the layout of each lane to those that have not had it, and Begin to all."""
        layouts = [manifest.layout for manifest in offer.manifests]
        if uninformed := self._membership.uninformed(receivers, " ".join(layout.id for layout in layouts)):
            for number, layout in enumerate(layouts):
                first_bytes = first_of(self._config.bucket_bytes) if self._lanes else 0
                new = described(layout, self._config.bucket_bytes, number, first_bytes)
                self._router.send_all([member.identity for member in uninformed], new)
        for number, manifest in enumerate(offer.manifests):
            begin = Begin(
                epoch=group.epoch,
                version=offer.version,
                incarnation=self._incarnation,
                evaluate=offer.evaluate,
                ranks={member.session: rank for rank, member in enumerate(receivers, start=1)},
                size=len(receivers) + 1,
                bucket_bytes=self._config.bucket_bytes,
                layout=manifest.layout.id,
                digests=digest_array(manifest),
                digest=offer.digest,
                **self._senders.of_lane(number, group is self._membership.beside),
                **(change.described() if change is not None else {}),
            )
            self._router.send_all([member.identity for member in receivers], begin)

    def _transmit(self, offer: Offer, parcel: Parcel, group: Group, *, fresh: bool) -> TransportError | None:
        """Send all pieces, in a new group where the epoch is fresh."""
        what: dict[str, Any] = {"epoch": group.epoch, "size": len(group.sessions) + 1}
        beside, timeout_s = group is self._membership.beside, self._config.collective_timeout_s
        prefix = group_prefix(self._router.run_id, self._incarnation, group.epoch)
        formation = Formation(rank=0, endpoint="", prefix=prefix, **what) if fresh else None
        order = Send(session=self._senders.session, version=offer.version, fresh=fresh, beside=beside, **what)
        futures = {rank: self._senders.send(rank, order) for rank in self._senders.ranks}
        futures[0] = self._sender.send(parcel, formation, beside=beside)
        pieces = max(len(parcel.pieces), sum(len(manifest.layout.bucket_sizes) for manifest in offer.manifests))
        longest_s = limit_s(pieces, len(offer.manifests), timeout_s)
        self._coordinator.pump(lambda: all(f.done() for f in futures.values()), time.monotonic() + longest_s)
        if late := [rank for rank, future in futures.items() if not future.done()]:
            doing = f"{self._board.doing} v{offer.version}, not done in {longest_s:.0f} s"
            whose = f" of learner rank {late[0]}" if self._lanes else ""
            raise WeightBusError(f"the transport{whose} does not keep its timeout: {doing} [silent]")
        return _cause([future.exception() for future in futures.values()])

    def _abort(self, offer: Offer, group: Group, receivers: list[Member], error: TransportError) -> list[Member]:
        """Break the group. Members that have staged everything go on; the others are sent the version again."""
        with self._board.changed:
            log.warning("weight bus: v%d epoch %d: %s", offer.version, group.epoch, error)
            group.sessions = ()
            aborted = [member for member in receivers if self._release(offer, member, group.epoch, error)]
        self._sender.leave(beside=group is self._membership.beside)
        return aborted

    def _is_senders(self, error: TransportError | None) -> bool:
        """Whether it is no receiver's fault. Raises WeightBusError: it does not pass."""
        now = time.monotonic()
        if isinstance(error, SenderBroken):
            self._broken_since = self._broken_since or now
            if (since_s := now - self._broken_since) > self._config.deadline_s:
                raise WeightBusError(f"nothing can be sent for {since_s:.1f} s: {error}")
        elif not isinstance(error, NotPacked | FolderFull):
            return False
        if self._lanes or isinstance(error, SenderBroken):
            self._rest_until = now + self._config.heartbeat_s
        return True

    def _release(self, offer: Offer, member: Member, epoch: int, error: TransportError) -> bool:
        """Abort a member; False when it has staged the version, or has left."""
        session, version, now = member.session, offer.version, time.monotonic()
        if self._membership.receiving(session, epoch, version) is None:
            return False
        self._router.send(member.identity, Abort(session=session, epoch=epoch, version=version, reason=str(error)))
        # a disk that is full now is so at once again
        retry_at = now + 2 * self._config.heartbeat_s if isinstance(error, FolderFull) else now
        self._membership.release(member, now, retry_at)
        offer.fail(member.name, str(error), error.symptom)
        return True


def _cause(errors: Sequence[BaseException | None]) -> TransportError | None:
    """The error of the sender that says most about why; raises one that is no TransportError."""
    found: list[TransportError] = []
    for error in errors:
        if isinstance(error, TransportError):
            found.append(error)
        elif error is not None:
            raise error
    # what all others wait for; a member that is gone shows at once, and one that waits for it only later
    own = NotPacked | SenderBroken
    return min(found, key=lambda error: (not isinstance(error, own), error.symptom != "closed"), default=None)
