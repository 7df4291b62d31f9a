"""The publisher's end of the data plane, on a thread of its own: the control plane is served meanwhile."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from weight_bus.delta.changes import Change
from weight_bus.errors import TransportError, WeightBusError
from weight_bus.offer import Offer
from weight_bus.transports.base import FORMING, Formation, Labelled, Transport

VERIFYING = "verifying what it received of"
SLACK_S = 15.0  # beside what the transport takes by its own timeout


class NotPacked(TransportError):
    """The learner is late with a bucket: no receiver's fault."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What travels in a round."""

    pieces: Sequence[torch.Tensor]  # flat uint8, one broadcast each
    change: Change | None  # none when they are the buckets themselves


class Sender:
    """Owns the transport.

    Args:
        transport: used by the thread of this object only, but for `serve`.
        timeout_s: weight_bus.collective_timeout_s.
        closing: why the publisher is being closed; "" while it is not.
        done: called on the thread when a parcel is sent, or was not.
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
