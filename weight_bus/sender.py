"""Sends what a learner rank has packed: its lanes, bucket by bucket in turn, each in a group of its own."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from weight_bus.delta.changes import Change
from weight_bus.errors import NotPacked, SenderBroken, TransportError, WeightBusError
from weight_bus.lanes import Lane, described
from weight_bus.manifest import Layout
from weight_bus.packing import PackingProgress
from weight_bus.transports.base import FORMING, Formation, Transport, of_lane

SLACK_S = 15.0  # beside what the transport takes by its own timeout


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels in a round."""

    version: int
    pieces: Sequence[torch.Tensor]  # flat uint8, one broadcast each
    sources: Sequence[tuple[int, int]]  # of each piece: lane, counted from 0 here, and its number there
    progress: PackingProgress
    layout: Layout  # of the pieces, where they are no change
    change: Change | None = None  # None when they are the buckets themselves


def limit_s(pieces: int, lanes: int, timeout_s: float) -> float:
    """Seconds after which transports that keep their own timeouts have sent a parcel, or have failed."""
    return (2 * pieces + FORMING * lanes) * timeout_s + SLACK_S


class _Ends:
    """A transport of each lane, and where its group meets."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self.transports = transports
        self.endpoints = [transport.serve() for transport in transports]

    def renew(self) -> list[int]:
        """Which lanes nobody could enter from here. They meet elsewhere now."""
        found = {number: transport.renew() for number, transport in enumerate(self.transports)}
        renewed = {number: endpoint for number, endpoint in found.items() if endpoint is not None}
        self.endpoints = [renewed.get(number, endpoint) for number, endpoint in enumerate(self.endpoints)]
        return [*renewed]


class Sender:
    """Owns a transport for each lane, on a thread of its own: the control plane is served meanwhile.

    Args:
        transports: of the main group.
        another: makes one for the group beside it; called when that is first needed.
        lanes: what each transport is for; empty where it is all there is.
        doing: called with what the receivers do meanwhile.
        closing: says why no more is to be sent; empty while it is.
        done: called at the end of a parcel.
    """

    def __init__(
        self,
        transports: Sequence[Transport],
        another: Callable[[], Transport],
        lanes: Sequence[Lane],
        timeout_s: float,
        *,
        doing: Callable[[str], None],
        closing: Callable[[], str],
        done: Callable[[], None],
    ) -> None:
        self._another, self._lanes, self._timeout_s = another, lanes, timeout_s
        self._ends = {False: _Ends(transports)}  # by whether they are of the group beside
        self._doing, self._closing, self._done = doing, closing, done
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-bus-data")

    def endpoints(self, *, beside: bool = False) -> list[str]:
        """Where the groups meet. Raises WeightBusError: another transport is not available."""
        return self._of(beside).endpoints

    def send(self, parcel: Parcel, formation: Formation | None, *, beside: bool = False) -> "Future[None]":
        """Begin to send, in groups that are built first with a `formation` (lane 0's).

        The future: TransportError; SenderBroken where others cannot meet here, since which `endpoints` has changed.
        """
        future = self._worker.submit(self._send, self._of(beside), parcel, formation)
        future.add_done_callback(lambda _: self._done())
        return future

    def leave(self, *, beside: bool = False) -> None:
        """Drop the groups. Raises WeightBusError when a transport does not."""
        try:
            for transport in self._of(beside).transports:
                self._worker.submit(transport.leave).result(SLACK_S)
        except TimeoutError as late:
            raise WeightBusError(f"the transport did not leave its broken group in {SLACK_S:.0f} s [silent]") from late

    def close(self) -> None:
        """End the data plane; a broadcast in flight ends by its own timeout."""
        for transport in (transport for ends in self._ends.values() for transport in ends.transports):
            self._worker.submit(transport.close)
        self._worker.shutdown(wait=True)

    def _of(self, beside: bool) -> "_Ends":
        if beside not in self._ends:
            self._ends[beside] = _Ends([self._another() for _ in self._ends[False].transports])
        return self._ends[beside]

    def _send(self, ends: "_Ends", parcel: Parcel, formation: Formation | None) -> None:
        try:
            self._pass(ends, parcel, formation)
        except TransportError as error:
            if not isinstance(error, NotPacked) and (broken := ends.renew()):
                where = ", ".join(filter(None, (ends.endpoints[number] for number in broken))) or "nowhere so far"
                what = f"this end is broken, and meets {where} from now on: {error.message}"
                raise SenderBroken(what, error.symptom) from error
            raise

    def _pass(self, ends: "_Ends", parcel: Parcel, formation: Formation | None) -> None:
        transports = ends.transports
        if formation is not None:
            self._doing(f"building the group of epoch {formation.epoch} for")
        for number, transport in enumerate(transports):
            with self._naming(number):
                if formation is not None:
                    its = replace(formation, endpoint=ends.endpoints[number])
                    transport.form(of_lane(its, self._lanes[number].number if self._lanes else 0))
                transport.label(parcel.version, parcel.layout if parcel.change is None else None)
        limit_s = self._timeout_s / 2  # receivers wait for each bucket, too
        for number, bucket in enumerate(parcel.pieces):
            lane, index = parcel.sources[number]
            if self._closing():
                raise TransportError(f"closed before bucket {number + 1}", "closed")
            there = parcel.progress.wait(number, limit_s)
            if self._lanes and (why := parcel.progress.called_off):  # of other ranks, the publisher does not know it
                raise NotPacked(f"v{parcel.version} is called off: {why}", "closed")
            if not there:
                what = f"bucket {number + 1} of {len(parcel.pieces)} of v{parcel.version}"
                raise NotPacked(f"{what} was not packed in {limit_s:.1f} s: the learner is still gathering", "slow")
            self._receiving(number, parcel)
            with self._naming(lane):
                transports[lane].broadcast(bucket, index)
        # buckets that are only launched arrive one by one afterwards
        for lane, transport in enumerate(transports):
            with self._naming(lane):
                numbers = [number for number, source in enumerate(parcel.sources) if source[0] == lane]
                transport.finish(partial(self._arrived, parcel, numbers))

    def _arrived(self, parcel: Parcel, numbers: Sequence[int], index: int) -> None:
        self._receiving(numbers[index] + 1, parcel)

    def _receiving(self, number: int, parcel: Parcel) -> None:
        count = len(parcel.pieces)
        self._doing(f"receiving bucket {min(number + 1, count)} of {count} of")

    @contextmanager
    def _naming(self, lane: int) -> Iterator[None]:
        """A lane that breaks is named, where there are several."""
        try:
            yield
        except TransportError as error:
            if not self._lanes:
                raise
            raise error.during(described(self._lanes[lane])) from error
