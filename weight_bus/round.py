"""One round: the version on offer to members that need it, in the group of one epoch.

The members of the last epoch use its group again; any other set forms the next epoch, of exactly those that answer
for it. While a round waits, the bus serves the control plane; in the end it does what the outcome says.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from configs.infrastructure import WeightBus
from weight_bus.control import Router
from weight_bus.delta.changes import Change
from weight_bus.errors import LATE, FolderFull, TransportError, WeightBusError
from weight_bus.membership import Member, State
from weight_bus.messages import Abort, Begin, Epoch, describe_manifest
from weight_bus.offer import Board, Offer
from weight_bus.transports.base import FORMING, Formation, Labelled, Transport, group_prefix

log = logging.getLogger(__name__)

VERIFYING = "verifying what it received of"
SLACK_S = 15.0  # beside what the transport takes by its own timeout


class NotPacked(TransportError, code="SLIP-BUS-11"):
    """The learner is late with a bucket: no receiver's fault."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels in a round."""

    pieces: Sequence[torch.Tensor]  # flat uint8, one broadcast each
    change: Change | None  # None when they are the buckets themselves


class Sender:
    """Owns the transport, on a thread of its own: the control plane is served meanwhile.

    `closing` says why the publisher is being closed, "" while it is not; `done` is called at the end of a parcel.
    """

    def __init__(
        self, transport: Transport, timeout_s: float, *, closing: Callable[[], str], done: Callable[[], None]
    ) -> None:
        self._transport, self._timeout_s, self._closing, self._done = transport, timeout_s, closing, done
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-bus-data")
        self.endpoint = transport.serve()
        self._doing = VERIFYING

    def doing(self, version: int) -> str:
        """What a receiver of this version does at the moment."""
        return f"{self._doing} v{version}"

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
        self._doing = VERIFYING
        self._done()

    def _send(self, offer: Offer, parcel: Parcel, formation: Formation | None) -> None:
        def receiving(index: int) -> str:
            return f"receiving bucket {index + 1} of {len(parcel.pieces)} of"

        def follow(index: int) -> None:
            """Buckets that are only launched arrive one by one afterwards."""
            self._doing = receiving(min(index + 1, len(parcel.pieces) - 1))

        if formation is not None:
            self._doing = f"building the group of epoch {formation.epoch} for"
            self._transport.form(formation)
        if isinstance(self._transport, Labelled):
            self._transport.label(offer.version, offer.manifest.by_bucket() if parcel.change is None else None)
        limit_s = self._timeout_s / 2  # receivers wait for each bucket, too
        for index, bucket in enumerate(parcel.pieces):
            if self._closing():
                raise TransportError(f"closed before bucket {index + 1}", "closed")
            if not offer.progress.wait(index, limit_s):
                what = f"bucket {index + 1} of {len(parcel.pieces)} of v{offer.version}"
                raise NotPacked(f"{what} was not packed in {limit_s:.1f} s: the learner is still gathering", "slow")
            self._doing = receiving(index)
            self._transport.broadcast(bucket, index)
        self._transport.finish(follow)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a round leaves to be done."""

    error: TransportError | None = None  # why the group broke; None when all was sent
    suspects: frozenset[str] = frozenset()
    """Sessions of the receivers of a broken group, any of which may have broken it."""
    charged: Member | None = None  # the only receiver of a broken group


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What every round works with."""

    config: WeightBus
    router: Router
    board: Board
    sender: Sender
    incarnation: int
    serve: Callable[[Callable[[], bool], float], None]
    """Serve the control plane until a condition holds, or the deadline has passed."""


class Round:
    """Sends the version on offer to receivers that are idle, once; `suspects` are those of the last round."""

    def __init__(self, ends: Ends, offer: Offer, receivers: list[Member], suspects: frozenset[str]) -> None:
        self._ends, self._offer, self._receivers, self._suspects = ends, offer, receivers, suspects
        self._config, self._board, self._sender = ends.config, ends.board, ends.sender
        self._membership = ends.board.membership
        self._epoch = 0

    def run(self) -> Outcome:
        """Send. Failures end in other states of the members and in the outcome, never in an error."""
        offer, started = self._offer, time.monotonic()
        fresh = not self._membership.in_group(self._receivers)
        if fresh:
            self._form()
        if not self._receivers:
            return Outcome(suspects=self._suspects)
        offer.spend("epoch", started)
        started = offer.sending_since = time.monotonic()
        parcel = self._begin()
        if parcel is None:
            return Outcome(suspects=self._suspects)
        error = self._transmit(parcel, fresh)
        offer.sent_at, offer.sending_since = offer.spend("send", started), 0.0
        if error is not None:
            return self._abort(error)
        self._board.emit("sent", offer.version)
        return Outcome()

    def _form(self) -> None:
        """Invite the receivers to the next epoch, and keep those that answer."""
        now = time.monotonic()
        # a survivor of a broken group may sit in its own collective timeout meanwhile
        patience = self._config.collective_timeout_s + 2 * self._config.heartbeat_s
        invited, membership = self._receivers, self._membership
        with self._board.changed:
            epoch = membership.invite(invited, now, now + patience)
            self._board.counters["epochs"] += 1
            names = [member.name for member in invited]
            for member in invited:
                self._ends.router.send(member.identity, Epoch(session=member.session, epoch=epoch, members=names))
        # the bus removes members that are silent, or have not answered when the patience is over
        self._settle(invited, State.INVITED, patience)
        with self._board.changed:
            ready = [m for m in invited if m.state is State.READY and membership.find(m.session) is m]
            if len(ready) > 1 and frozenset(m.session for m in ready) == self._suspects:
                # all live and yet their round failed: one at a time shows which data plane is broken
                for member in ready[1:]:
                    membership.release(member, time.monotonic())
                ready = ready[:1]
        self._receivers = ready
        verb = "resends" if any(member.name in self._offer.failed for member in ready) else "sends"
        detail = ", ".join(member.name for member in ready)
        log.info("weight bus: epoch %d (%s) %s v%d", epoch, detail or "nobody", verb, self._offer.version)
        self._board.emit("epoch", self._offer.version, detail=detail)

    def _begin(self) -> Parcel | None:
        """Announce the version to every receiver; None when it was called off meanwhile."""
        offer, now = self._offer, time.monotonic()
        with self._board.changed:
            if offer.progress.called_off:
                for member in self._receivers:
                    if member.state is State.READY:
                        self._membership.release(member, now)
                return None
            parcel = self._parcel()
            target, deadline = (offer.version, offer.digest), now + self._config.deadline_s
            self._membership.begin(self._receivers, target, now, deadline)
            self._epoch = self._membership.epoch
            self._board.counters["rounds"] += 1
            for rank, member in enumerate(self._receivers, start=1):
                self._ends.router.send(member.identity, self._announcement(parcel, member, rank))
        return parcel

    def _parcel(self) -> Parcel:
        """The change since the version before where every receiver has that one staged, else all of it."""
        offer, change = self._offer, self._offer.change
        if change is not None and all(member.base == change.base for member in self._receivers):
            parcel = Parcel(change.pieces(self._config.bucket_bytes), change)
            self._board.counters["changes"] += 1
        else:
            parcel = Parcel(offer.buckets, None)
        offer.wire_bytes = sum(piece.numel() for piece in parcel.pieces)
        return parcel

    def _announcement(self, parcel: Parcel, member: Member, rank: int) -> Begin:
        names, dtypes, shapes, digests = describe_manifest(self._offer.manifest)
        change = parcel.change
        return Begin(
            session=member.session,
            epoch=self._epoch,
            version=self._offer.version,
            incarnation=self._ends.incarnation,
            evaluate=self._offer.evaluate,
            rank=rank,
            size=len(self._receivers) + 1,
            endpoint=self._sender.endpoint,
            bucket_bytes=self._config.bucket_bytes,
            names=names,
            dtypes=dtypes,
            shapes=shapes,
            digests=digests,
            digest=self._offer.digest,
            kept=self._offer.manifest.kept,
            base=change.base if change is not None else "",
            wire_bytes=change.coded.numel() if change is not None else 0,
            change_bytes=change.num_bytes if change is not None else 0,
            change_digest=change.digest if change is not None else "",
        )

    def _transmit(self, parcel: Parcel, fresh: bool) -> TransportError | None:
        """Send all pieces, in a new group where the epoch is fresh."""
        prefix = group_prefix(self._ends.router.run_id, self._ends.incarnation, self._epoch)
        size = len(self._receivers) + 1
        group = Formation(epoch=self._epoch, rank=0, size=size, endpoint=self._sender.endpoint, prefix=prefix)
        future = self._sender.send(self._offer, parcel, group if fresh else None)
        limit_s = self._sender.limit_s(parcel)
        self._ends.serve(future.done, time.monotonic() + limit_s)
        if not future.done():
            doing = self._sender.doing(self._offer.version)
            raise WeightBusError(
                f"the transport does not keep its timeout: {doing}, not done in {limit_s:.0f} s [silent]"
            )
        error = future.exception()
        if error is not None and not isinstance(error, TransportError):
            raise error
        return error

    def _settle(self, members: list[Member], busy: State, limit_s: float) -> None:
        """Wait until none of these members is in this state any more."""

        def settled() -> bool:
            return not any(m.state is busy and self._membership.find(m.session) is m for m in members)

        self._ends.serve(settled, time.monotonic() + limit_s + self._config.heartbeat_s)

    def _abort(self, error: TransportError) -> Outcome:
        """Break the group. Members that have staged everything go on; the others are sent the version again."""
        with self._board.changed:
            log.warning("weight bus: v%d epoch %d: %s", self._offer.version, self._epoch, error)
            self._membership.break_group()
            aborted = [member for member in self._receivers if self._release(member, error)]
        self._sender.leave()
        if isinstance(error, NotPacked | FolderFull):  # here, and no receiver's fault
            return Outcome(error=error)
        return Outcome(
            error=error,
            suspects=frozenset(member.session for member in self._receivers),
            charged=aborted[0] if aborted and len(self._receivers) == 1 else None,
        )

    def _release(self, member: Member, error: TransportError) -> bool:
        """Abort a member; False when it has staged the version, or has left."""
        session, epoch, version = member.session, self._epoch, self._offer.version
        if self._membership.receiving(session, epoch, version) is None:
            return False
        abort = Abort(session=session, epoch=epoch, version=version, reason=str(error))
        self._ends.router.send(member.identity, abort)
        now = time.monotonic()
        # a disk that is full now is so at once again
        retry_at = now + 2 * self._config.heartbeat_s if isinstance(error, FolderFull) else now
        self._membership.release(member, now, retry_at)
        self._offer.failed[member.name] = str(error)
        self._offer.late |= {member.name} if error.symptom in LATE else set()
        return True
