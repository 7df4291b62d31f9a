"""One round: the current version to those who need it, in the group of one epoch.

The members of the last epoch use its group again; any other set forms the next epoch of exactly those who
answer for it. Buckets travel on a thread of their own, so the control plane is served during a broadcast.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from configs.infrastructure import WeightBus
from weight_bus.changes import Change
from weight_bus.control import Router
from weight_bus.errors import TransportError, WeightBusError
from weight_bus.membership import Member, State, first_ranks
from weight_bus.messages import Abort, Begin, Epoch, Go, describe_manifest
from weight_bus.offer import Board, Event, Offer
from weight_bus.transports.base import FORMING, Formation, Labelled, Transport, group_prefix

log = logging.getLogger(__name__)

WORKER_SLACK_S = 15.0


class NotPacked(TransportError):
    """The learner is late with a bucket: no receiver's fault."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels in a round."""

    pieces: Sequence[torch.Tensor]
    """Flat uint8, one broadcast each."""
    change: Change | None
    """None when they are the buckets themselves."""


class Control(Protocol):
    """What a round asks of the control plane."""

    def pump(self, until: Callable[[], bool], deadline: float) -> bool:
        """Serve the control plane until a condition holds (True) or the deadline has passed (False)."""

    def reach(self, member: Member) -> bool:
        """Whether a member has a connection; it is removed if not."""

    def charge(self, member: Member, reason: str) -> None:
        """Count a failed broadcast against the only receiver it had."""

    def lose(self, member: Member, why: str, symptom: str, *, rejoin: bool = True) -> None:
        """Remove a member, and name it."""


class Rounds:
    """Runs rounds on the bus thread; `control` serves the control plane while a round waits."""

    def __init__(
        self,
        config: WeightBus,
        *,
        router: Router,
        board: Board,
        transport: Transport,
        incarnation: int,
        control: Control,
    ) -> None:
        self._config = config
        self._direct = config.apply == "direct"
        self._router = router
        self._board = board
        self._transport = transport
        self._incarnation = incarnation
        self._control = control
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-bus-data")
        self._endpoint = transport.serve()
        self._bucket = -1
        """Bucket on the wire, -1 between rounds."""
        self._forming = False
        """The group of an epoch is being built."""
        self._pieces = 0
        """How many buckets this round has."""
        self._failed: frozenset[str] = frozenset()
        """Sessions of the last round if it failed."""

    def run(self, receivers: list[Member]) -> None:
        """Send the current version to `receivers`. Failures end in another state of the members, never in an error.

        Raises:
            BusClosed: close() was called.
            WeightBusError: the transport does not keep its own timeout.
        """
        offer = self._board.current
        assert offer is not None
        started = time.monotonic()
        with self._board.changed:
            receivers = [member for member in receivers if self._control.reach(member)]
            fresh = not self._board.membership.in_group(receivers)
        if fresh:
            receivers = self._form(offer, receivers)
        if not receivers:
            return
        offer.seconds["epoch"] = offer.seconds.get("epoch", 0.0) + time.monotonic() - started
        self._send(offer, receivers, fresh)

    def activity(self, member: Member) -> str:
        """What a member is doing, in words."""
        offer = self._board.current
        if member.state is State.RECEIVING and offer is not None:
            if self._bucket >= 0:
                return f"receiving bucket {self._bucket + 1} of {self._pieces} of v{member.target}"
            if self._forming:
                return f"building the group of epoch {member.epoch} for v{member.target}"
            return f"verifying what it received of v{member.target}"
        engaged = member.state in (State.APPLYING, State.HOLDING, State.PAUSING, State.PAUSED)
        return f"{member.state.value} v{member.target}" if engaged else member.state.value

    def close(self) -> None:
        """End the data plane; a broadcast in flight ends by its own timeout."""
        self._worker.submit(self._transport.close)
        self._worker.shutdown(wait=True)

    def _form(self, offer: Offer, receivers: list[Member]) -> list[Member]:
        """Invite and return exactly those who answer. A survivor may sit in its own collective timeout meanwhile."""
        if self._direct:
            self._leave(offer)  # the engines leave the old group, too, when they are invited
        now = time.monotonic()
        patience = self._config.collective_timeout_s + 2 * self._config.heartbeat_s
        with self._board.changed:
            membership = self._board.membership
            epoch = membership.invite(receivers, now, now + patience)
            self._board.counters["epochs"] += 1
            names = [member.name for member in receivers]
            for member in receivers:
                self._router.send(member.identity, Epoch(session=member.session, epoch=epoch, members=names))

        def answered() -> bool:
            return not any(m.state is State.INVITED and m.name in membership.members for m in receivers)

        # the pump removes who is silent, and who has not answered when the patience is over
        self._control.pump(answered, now + patience + self._config.heartbeat_s)
        with self._board.changed:
            ready = [m for m in receivers if m.state is State.READY and membership.find(m.session) is m]
            if len(ready) > 1 and frozenset(m.session for m in ready) == self._failed:
                # all live and yet their round failed: one at a time shows whose data plane is broken
                for member in ready[1:]:
                    membership.release(member, time.monotonic())
                ready = ready[:1]
        verb = "resends" if any(member.name in offer.failed for member in ready) else "sends"
        names = [member.name for member in ready]
        log.info("weight bus: epoch %d (%s) %s v%d", epoch, ", ".join(names) or "nobody", verb, offer.version)
        self._board.emit(Event(kind="epoch", version=offer.version, epoch=epoch, detail=", ".join(names)))
        return ready

    def _send(self, offer: Offer, receivers: list[Member], fresh: bool) -> None:
        started = time.monotonic()
        with self._board.changed:
            membership = self._board.membership
            deadline = started + self._config.deadline_s
            if offer.progress.called_off:
                for member in receivers:
                    if member.state is State.READY:
                        membership.release(member, started)
                return
            parcel = self._parcel(offer, receivers)
            membership.begin(receivers, (offer.version, offer.digest), started, deadline, pause=self._direct)
            epoch = membership.epoch
            ranks, size = first_ranks(receivers)
            self._board.counters["rounds"] += 1
            offer.rounds += 1
            for rank, member in zip(ranks, receivers, strict=True):
                self._router.send(member.identity, self._begin(offer, parcel, member, rank=rank, size=size))
        prefix = group_prefix(self._router.run_id, self._incarnation, epoch)
        formation = Formation(epoch=epoch, rank=0, size=size, endpoint=self._endpoint, prefix=prefix)
        error = self._pause(offer, receivers) if self._direct else None
        if error is None:
            future = self._worker.submit(self._transmit, offer, parcel, formation if fresh else None)
            future.add_done_callback(lambda _: self._router.wake.set())
            error = self._await(future, offer, len(parcel.pieces))
        if error is None and self._direct:
            # SGLang ends a transfer with no collective: only the subscribers know that everything is there
            self._settle(offer, receivers, State.RECEIVING, self._config.deadline_s)
        self._bucket = -1
        offer.sent_at = time.monotonic()
        offer.seconds["send"] = offer.seconds.get("send", 0.0) + offer.sent_at - started
        if error is None:
            self._failed = frozenset()
            self._board.emit(Event(kind="sent", version=offer.version, epoch=epoch))
            if self._direct:  # the last bytes may still be on their way to an engine's GPU until its digests are here
                self._settle(offer, receivers, State.APPLYING, self._config.deadline_s)
        else:
            self._abort(offer, receivers, error)

    def _pause(self, offer: Offer, receivers: list[Member]) -> TransportError | None:
        """Every engine stands still, and is told to receive; or why one does not, with all untouched."""
        membership = self._board.membership
        epoch = membership.epoch

        def answered() -> bool:
            return not any(m.state is State.PAUSING and membership.find(m.session) is m for m in receivers)

        # the pump removes who is silent or too slow; who finishes an evaluation first has said so
        self._control.pump(answered, time.monotonic() + self._config.deadline_s + self._config.heartbeat_s)
        with self._board.changed:
            ready = [m for m in receivers if m.state is State.PAUSED and membership.find(m.session) is m]
            if ready != receivers:
                away = [m for m in receivers if m not in ready]
                why = ", ".join(f"{m.name!r}: {m.hold if m.state is State.HOLDING else m.state.value}" for m in away)
                return TransportError(f"nothing was sent, not every engine is paused ({why})", "slow")
            now = time.monotonic()
            membership.go(receivers, now, now + self._config.deadline_s)
            for m in receivers:
                self._router.send(m.identity, Go(session=m.session, epoch=epoch, version=offer.version))
        return None

    def _settle(self, offer: Offer, receivers: list[Member], busy: State, limit_s: float) -> None:
        """Wait until no engine of the round is in this state any more."""
        membership = self._board.membership

        def settled() -> bool:
            engaged = [m for m in receivers if m.state is busy and m.target == offer.version]
            return not any(membership.find(m.session) is m for m in engaged)

        self._control.pump(settled, time.monotonic() + limit_s + self._config.heartbeat_s)

    def _parcel(self, offer: Offer, receivers: list[Member]) -> Parcel:
        """The change since the version before where every receiver has that one staged, else all of it."""
        change = offer.change
        if change is not None and all(member.base == change.base for member in receivers):
            parcel = Parcel(change.pieces(self._config.bucket_bytes), change)
            self._board.counters["changes"] += 1
        else:
            parcel = Parcel(offer.buckets, None)
        offer.wire_bytes = sum(piece.numel() for piece in parcel.pieces)
        self._pieces = len(parcel.pieces)
        return parcel

    def _begin(self, offer: Offer, parcel: Parcel, member: Member, *, rank: int, size: int) -> Begin:
        names, dtypes, shapes, digests = describe_manifest(offer.manifest)
        return Begin(
            session=member.session,
            epoch=self._board.membership.epoch,
            version=offer.version,
            incarnation=self._incarnation,
            evaluate=offer.evaluate,
            rank=rank,
            size=size,
            endpoint=self._endpoint,
            bucket_bytes=self._config.bucket_bytes,
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            digests=digests,
            digest=offer.digest,
            base=parcel.change.base if parcel.change is not None else "",
            wire_bytes=parcel.change.coded.numel() if parcel.change is not None else 0,
            change_bytes=parcel.change.num_bytes if parcel.change is not None else 0,
        )

    def _transmit(self, offer: Offer, parcel: Parcel, formation: Formation | None) -> None:
        if formation is not None:
            self._forming = True
            try:
                self._transport.form(formation)
            finally:
                self._forming = False
        if isinstance(self._transport, Labelled):
            self._transport.label(offer.version, offer.manifest.by_bucket() if parcel.change is None else None)
        limit_s = self._config.collective_timeout_s / 2  # receivers wait for each bucket, too
        for index, bucket in enumerate(parcel.pieces):
            if self._board.closing:
                raise TransportError(f"closed before bucket {index + 1}", "closed")
            if not offer.progress.wait(index, limit_s):
                what = f"bucket {index + 1} of {len(parcel.pieces)} of v{offer.version}"
                raise NotPacked(f"{what} was not packed in {limit_s:.1f} s: the learner is still gathering", "slow")
            self._bucket = index
            self._transport.broadcast(bucket, index)
        self._transport.finish(self._follow)

    def _follow(self, index: int) -> None:
        """Buckets that are only launched arrive one by one afterwards."""
        self._bucket = min(index + 1, self._pieces - 1)

    def _await(self, future: "Future[None]", offer: Offer, pieces: int) -> TransportError | None:
        limit = (2 * pieces + FORMING) * self._config.collective_timeout_s + WORKER_SLACK_S
        if not self._control.pump(future.done, time.monotonic() + limit):
            raise WeightBusError(
                f"v{offer.version}: the transport did not end bucket {self._bucket + 1} in {limit:.0f} s"
            )
        try:
            future.result()
        except TransportError as error:
            return error
        return None

    def _abort(self, offer: Offer, receivers: list[Member], error: TransportError) -> None:
        """The group is broken. Who has staged everything goes on; the others are sent the version again."""
        now = time.monotonic()
        with self._board.changed:
            membership = self._board.membership
            epoch = membership.epoch
            log.warning("weight bus: v%d epoch %d: %s", offer.version, epoch, error)
            membership.break_group()
            theirs = not isinstance(error, NotPacked)
            self._failed = frozenset(member.session for member in receivers) if theirs else frozenset()
            touched = [m for m in receivers if self._direct and membership.receiving(m.session, epoch, offer.version)]
            for member in receivers:
                what = (member.session, epoch, offer.version)
                if member in touched or member.state is State.HOLDING:
                    continue
                if (membership.receiving(*what) or membership.preparing(*what)) is None:
                    continue
                abort = Abort(session=member.session, epoch=epoch, version=offer.version, reason=str(error))
                self._router.send(member.identity, abort)
                membership.release(member, now)
                offer.failed[member.name] = str(error)
                if len(receivers) == 1 and theirs:
                    self._control.charge(member, str(error))
        self._leave(offer)
        if touched:
            self._settle(
                offer, touched, State.RECEIVING, self._config.collective_timeout_s
            )  # those that the end of the group wakes
        with self._board.changed:
            for member in touched:
                if membership.receiving(member.session, epoch, offer.version) is not None:
                    why = f"{error}; its engine is spoiled and restarts,"
                    self._control.lose(member, why, error.symptom, rejoin=False)

    def _leave(self, offer: Offer) -> None:
        try:
            self._worker.submit(self._transport.leave).result(WORKER_SLACK_S)
        except TimeoutError as late:
            reason = (
                f"v{offer.version}: the transport did not leave its broken group in {WORKER_SLACK_S:.0f} s [silent]"
            )
            raise WeightBusError(reason) from late
