"""The bus thread of the publisher: rounds of updates, without the learner's main thread.

consumes:     packed updates from the board, messages of subscribers
produces:     rounds of buckets, Commit and Abort, reports on the board
waits for:    subscribers (silence, slowness and the collective timeout bound every wait)
unblocked by: a message, a packed update, a heartbeat period, close()

A round sends the version on offer to members that need it, in the group of one epoch. The members of the last epoch use
its group again; any other set forms the next epoch, of exactly those that answer for it.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from configs.infrastructure import WeightBus
from weight_bus.control import Router, wake_quickly
from weight_bus.coordinator import Coordinator
from weight_bus.delta.changes import Change
from weight_bus.errors import BusClosed, FolderFull, NotPacked, TransportError, WeightBusError
from weight_bus.membership import Member, State
from weight_bus.messages import Abort, Begin, Epoch, described, digest_array
from weight_bus.offer import VERIFYING, Board, Offer
from weight_bus.transports.base import FORMING, Formation, Transport, group_prefix

log = logging.getLogger(__name__)

SLACK_S = 15.0  # beside what the transport takes by its own timeout


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels in a round."""

    pieces: Sequence[torch.Tensor]  # flat uint8, one broadcast each
    change: Change | None  # None when they are the buckets themselves


class Sender:
    """Owns the transport, on a thread of its own: the control plane is served meanwhile.

    `done` is called at the end of a parcel.
    """

    def __init__(self, transport: Transport, timeout_s: float, board: Board, done: Callable[[], None]) -> None:
        self._transport, self._timeout_s, self._board, self._done = transport, timeout_s, board, done
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-bus-data")
        self.endpoint = transport.serve()

    def send(self, offer: Offer, parcel: Parcel, formation: Formation | None) -> "Future[None]":
        """Begin to send; `formation` is the group to build first. The future raises TransportError."""
        future = self._worker.submit(self._send, offer, parcel, formation)
        future.add_done_callback(self._end)
        return future

    def limit_s(self, parcel: Parcel) -> float:
        """Seconds after which a transport that keeps its own timeouts has sent a parcel, or has failed."""
        return (2 * len(parcel.pieces) + FORMING) * self._timeout_s + SLACK_S

    def leave(self) -> None:
        """Drop the group. Raises WeightBusError when the transport does not."""
        try:
            self._worker.submit(self._transport.leave).result(SLACK_S)
        except TimeoutError as late:
            raise WeightBusError(f"the transport did not leave its broken group in {SLACK_S:.0f} s [silent]") from late

    def close(self) -> None:
        """End the data plane; a broadcast in flight ends by its own timeout."""
        self._worker.submit(self._transport.close)
        self._worker.shutdown(wait=True)

    def _end(self, _: "Future[None]") -> None:
        self._board.doing = VERIFYING
        self._done()

    def _send(self, offer: Offer, parcel: Parcel, formation: Formation | None) -> None:
        board, count = self._board, len(parcel.pieces)

        def receiving(index: int) -> None:
            board.doing = f"receiving bucket {min(index + 1, count)} of {count} of"

        if formation is not None:
            board.doing = f"building the group of epoch {formation.epoch} for"
            self._transport.form(formation)
        self._transport.label(offer.version, offer.manifest.layout if parcel.change is None else None)
        limit_s = self._timeout_s / 2  # receivers wait for each bucket, too
        for index, bucket in enumerate(parcel.pieces):
            if board.closing:
                raise TransportError(f"closed before bucket {index + 1}", "closed")
            if not offer.progress.wait(index, limit_s):
                what = f"bucket {index + 1} of {count} of v{offer.version}"
                raise NotPacked(f"{what} was not packed in {limit_s:.1f} s: the learner is still gathering", "slow")
            receiving(index)
            self._transport.broadcast(bucket, index)
        # buckets that are only launched arrive one by one afterwards
        self._transport.finish(lambda index: receiving(index + 1))


class Bus:
    """Started by Publisher; ends with `board.closing`."""

    def __init__(
        self, config: WeightBus, *, router: Router, board: Board, transport: Transport, incarnation: int
    ) -> None:
        self._config, self._router, self._board, self._incarnation = config, router, board, incarnation
        self._membership = board.membership
        self._coordinator = Coordinator(
            config, router=router, board=board, facts=transport.facts(), incarnation=incarnation
        )
        self._sender = Sender(transport, config.collective_timeout_s, board, router.wake)
        self._suspects: frozenset[str] = frozenset()
        """Sessions of the receivers of the last group, where it broke: any of them may have broken it."""
        self.thread = threading.Thread(target=self._run, name="weight-bus", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        wake_quickly()
        try:
            while True:
                self._take_up()
                if receivers := self._receivers():
                    self._round(receivers)
                else:
                    due = time.monotonic() + self._config.heartbeat_s
                    self._coordinator.pump(lambda: bool(self._board.pending or self._receivers()), due)
        except BusClosed as closed:
            self._coordinator.say_goodbye(str(closed))
        except Exception as error:
            log.exception("weight bus: the publisher's thread failed")
            with self._board.changed:
                self._board.failure = error
                self._board.changed.notify_all()
            self._coordinator.say_goodbye(f"the publisher failed: {error}")
        finally:
            self._sender.close()
            self._router.close()

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

    def _receivers(self) -> list[Member]:
        with self._board.changed:
            offer = self._board.current
            if offer is None or offer.progress.stalled:
                return []
            return self._membership.needing(offer.version, time.monotonic())

    # ---- a round ----

    def _round(self, receivers: list[Member]) -> None:
        """Send the current version to members that are idle, once. Failures end in other states of the members."""
        offer = self._board.current
        assert offer is not None
        with self._board.changed:
            receivers = [member for member in receivers if self._coordinator.reach(member)]
        started = time.monotonic()
        fresh = not self._membership.in_group(receivers)
        if fresh and receivers:
            receivers = self._form(offer, receivers)
        if not receivers:
            return
        offer.spend("epoch", started)
        started = offer.sending_since = time.monotonic()
        parcel = self._begin(offer, receivers)
        if parcel is None:
            return
        error = self._transmit(offer, parcel, len(receivers) + 1, fresh=fresh)
        offer.sent_at, offer.sending_since = offer.spend("send", started), 0.0
        self._suspects = frozenset()
        if error is None:
            self._board.emit("sent", offer.version)
        else:
            self._abort(offer, receivers, error)

    def _form(self, offer: Offer, invited: list[Member]) -> list[Member]:
        """Invite members to the next epoch; those that answer."""
        # a survivor of a broken group may sit in its own collective timeout meanwhile
        patience = self._config.collective_timeout_s + 2 * self._config.heartbeat_s
        membership, now = self._membership, time.monotonic()
        with self._board.changed:
            epoch = membership.invite(invited, now, now + patience)
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
            if len(ready) > 1 and frozenset(m.session for m in ready) == self._suspects:
                # all live and yet their round failed: one at a time shows which data plane is broken
                for member in ready[1:]:
                    membership.release(member, time.monotonic())
                ready = ready[:1]
        verb = "resends" if any(member.name in offer.failed for member in ready) else "sends"
        detail = ", ".join(member.name for member in ready)
        log.info("weight bus: epoch %d (%s) %s v%d", epoch, detail or "nobody", verb, offer.version)
        self._board.emit("epoch", offer.version, detail=detail)
        return ready

    def _begin(self, offer: Offer, receivers: list[Member]) -> Parcel | None:
        """Announce the version to every receiver; None when it was called off meanwhile."""
        now = time.monotonic()
        with self._board.changed:
            if offer.progress.called_off:
                for member in receivers:
                    if member.state is State.READY:
                        self._membership.release(member, now)
                return None
            parcel = self._parcel(offer, receivers)
            self._membership.begin(receivers, (offer.version, offer.digest), now, now + self._config.deadline_s)
            self._board.counters["rounds"] += 1
            self._announce(offer, parcel.change, receivers)
        return parcel

    def _parcel(self, offer: Offer, receivers: list[Member]) -> Parcel:
        """The change since the version before where every receiver has that one staged, else all of it."""
        parcel, change = Parcel(offer.buckets, None), offer.change
        if change is not None and all(member.base == change.base for member in receivers):
            parcel = Parcel(change.pieces(self._config.bucket_bytes), change)
            self._board.counters["changes"] += 1
        offer.wire_bytes = sum(piece.numel() for piece in parcel.pieces)
        return parcel

    def _announce(self, offer: Offer, change: Change | None, receivers: Sequence[Member]) -> None:
        """Send the layout to those that have not had it, and Begin to all."""
        layout = offer.manifest.layout
        if uninformed := self._membership.uninformed(receivers, layout.id):
            new = described(layout, self._config.bucket_bytes)
            self._router.send_all([member.identity for member in uninformed], new)
        begin = Begin(
            epoch=self._membership.epoch,
            version=offer.version,
            incarnation=self._incarnation,
            evaluate=offer.evaluate,
            ranks={member.session: rank for rank, member in enumerate(receivers, start=1)},
            size=len(receivers) + 1,
            endpoint=self._sender.endpoint,
            bucket_bytes=self._config.bucket_bytes,
            layout=layout.id,
            digests=digest_array(offer.manifest),
            digest=offer.digest,
            **(change.described() if change is not None else {}),
        )
        self._router.send_all([member.identity for member in receivers], begin)

    def _transmit(self, offer: Offer, parcel: Parcel, size: int, *, fresh: bool) -> TransportError | None:
        """Send all pieces, in a new group where the epoch is fresh."""
        epoch, endpoint = self._membership.epoch, self._sender.endpoint
        prefix = group_prefix(self._router.run_id, self._incarnation, epoch)
        group = Formation(epoch=epoch, rank=0, size=size, endpoint=endpoint, prefix=prefix)
        future = self._sender.send(offer, parcel, group if fresh else None)
        limit_s = self._sender.limit_s(parcel)
        self._coordinator.pump(future.done, time.monotonic() + limit_s)
        if not future.done():
            doing = f"{self._board.doing} v{offer.version}, not done in {limit_s:.0f} s"
            raise WeightBusError(f"the transport does not keep its timeout: {doing} [silent]")
        error = future.exception()
        if error is not None and not isinstance(error, TransportError):
            raise error
        return error

    def _abort(self, offer: Offer, receivers: list[Member], error: TransportError) -> None:
        """Break the group. Members that have staged everything go on; the others are sent the version again."""
        epoch = self._membership.epoch
        with self._board.changed:
            log.warning("weight bus: v%d epoch %d: %s", offer.version, epoch, error)
            self._membership.break_group()
            aborted = [member for member in receivers if self._release(offer, member, epoch, error)]
        self._sender.leave()
        if isinstance(error, NotPacked | FolderFull):  # here, and no receiver's fault
            return
        self._suspects = frozenset(member.session for member in receivers)
        if aborted and len(receivers) == 1:
            self._coordinator.charge(aborted[0], str(error))

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
