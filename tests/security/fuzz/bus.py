"""The weight bus's control plane as targets: the publisher's ROUTER and a subscriber's DEALER."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import zmq

from configs.infrastructure import WeightBus
from replay.channel import WireError
from tests.security.fuzz.targets import HOST, PATIENCE_S, RUN, FakeServer, Vanished, connected, discard
from weight_bus import BusClosed, Publisher, RemovedFromBus, Subscriber
from weight_bus.digest import slice_digest
from weight_bus.messages import TO_PUBLISHER, TO_SUBSCRIBER, Heartbeat
from weight_bus.transports.base import Formation, ignore

CONFIG = WeightBus(bucket_bytes=1024, deadline_s=1.0, collective_timeout_s=0.5, heartbeat_s=0.2, max_heals=2)
PUBLISH_DRAINS = 20
"""After this many batches of messages the next version goes out."""
WEIGHTS = {"embed": torch.zeros(8, 4), "layer.weight": torch.zeros(4, 4, dtype=torch.bfloat16), "norm": torch.zeros(4)}


class NoTransport:
    """A data plane on which everything arrives at once, as zeros."""

    device = torch.device("cpu")

    def facts(self) -> dict[str, str]:
        """Nothing must be alike."""
        return {}

    def serve(self) -> str:
        """Nowhere."""
        return f"{HOST}:1"

    def form(self, formation: Formation) -> None:
        """Alone."""

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """The bucket is what it is."""

    def finish(self, arrived: Any = ignore) -> None:
        """All has arrived."""

    def leave(self) -> None:
        """There is no group."""

    def close(self) -> None:
        """There is nothing to close."""


class Counted:
    """A thread that reads messages, seen from the thread that sends them."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.accepted = self._read = self._sent = 0

    def wrap(self, poll: Callable[[float], Any]) -> Callable[[float], Any]:
        """`poll`, counting the messages that it returns: one, none or a list."""

        def polling(timeout_s: float) -> Any:
            found = poll(timeout_s)
            messages = [message for _, message in found] if isinstance(found, list) else [found] * (found is not None)
            self.accepted += sum(not isinstance(message, WireError) for message in messages)
            self._read += len(messages)
            return found

        return polling

    def wait(self, count: int) -> None:
        """Until that many more were read. Raises the reader's failure, or Vanished."""
        self._sent += count
        deadline = time.monotonic() + PATIENCE_S
        while self._read < self._sent:
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > deadline:
                raise Vanished(f"{self._sent - self._read} of {count} messages")
            time.sleep(0.0005)


class PublisherTarget:
    """Subscribers send rubbish to the publisher while it publishes."""

    kinds = TO_PUBLISHER

    async def open(self) -> None:
        self._publisher = Publisher(
            CONFIG, host=HOST, run_id=RUN, incarnation=1, transport_factory=lambda _, __: NoTransport()
        )
        self._context = zmq.Context()
        self._reader = Counted()
        router = self._publisher._router
        router.poll = self._reader.wrap(router.poll)  # type: ignore[method-assign,assignment]
        self._peers = [connected(self._context, router.address, name) for name in ("r0.a", "r1.b", "r0.a/beat")]
        self._turn = self._drained = self._version = 0
        self._publish()

    def _publish(self) -> None:
        digests = {name: slice_digest(tensor) for name, tensor in WEIGHTS.items()}
        self._publisher.start_publish(self._version, WEIGHTS.items(), digests)
        self._version += 1

    @property
    def accepted(self) -> int:
        return self._reader.accepted

    def given(self) -> Mapping[str, Any]:
        known = {"session": f"s{self._turn % 2}", "name": f"r{self._turn % 2}", "instance": f"i{self._turn % 2}"}
        now = {"epoch": self._publisher.epoch, "version": self._version - 1}
        return {**known, **now, "facts": {}, "ranks": 1, "corrupt": [], "differences": [], "limit_s": 0.1}

    def send(self, frames: list[bytes]) -> None:
        self._turn += 1
        peer = self._peers[self._turn % len(self._peers)]
        peer.send_multipart(frames)
        discard(peer)

    async def drain(self, count: int) -> None:
        board = self._publisher._board
        self._reader.failure = board.failure
        self._reader.wait(count)
        self._drained += 1
        if self._drained % PUBLISH_DRAINS == 0 and board.pending is None:
            self._publish()

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._context.term()
        self._publisher.close()


class SubscriberTarget:
    """The publisher sends rubbish to a subscriber."""

    kinds = TO_SUBSCRIBER

    async def open(self) -> None:
        self._server = FakeServer()
        self._subscriber = Subscriber(
            self._server.address, name="r0", config=CONFIG, host=HOST, run_id=RUN,
            transport_factory=lambda _, __: NoTransport(),
        )  # fmt: skip
        self._reader = Counted()
        dealer = self._subscriber._dealer
        dealer.poll = self._reader.wrap(dealer.poll)  # type: ignore[method-assign,assignment]
        self._closing = False
        self._thread = threading.Thread(target=self._receive, name="fuzzed-subscriber", daemon=True)
        self._thread.start()
        self._server.meet(f"r0.{self._subscriber._instance}", Heartbeat(session=""))
        self._reader.wait(1)

    def _receive(self) -> None:
        try:
            while not self._closing:
                with contextlib.suppress(BusClosed, RemovedFromBus):  # Goodbye and Removed
                    self._subscriber.receive(self._load, activate=_ignored, quarantine=_ignored)
        except Exception as error:  # noqa: BLE001 - this is what the fuzzer looks for
            self._reader.failure = error

    @staticmethod
    def _load(version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        return {name: slice_digest(tensor) for name, tensor in tensors}

    @property
    def accepted(self) -> int:
        return self._reader.accepted

    def given(self) -> Mapping[str, Any]:
        return {"session": self._subscriber._session, "epoch": self._subscriber._epoch, "rejoin": True}

    def send(self, frames: list[bytes]) -> None:
        self._server.send(frames)

    async def drain(self, count: int) -> None:
        self._reader.wait(count)

    def close(self) -> None:
        self._closing = True
        self._subscriber.stop()
        self._thread.join(PATIENCE_S)
        self._subscriber.close()
        self._server.close()


def _ignored(version: int, what: Any) -> None:
    """Nobody serves this engine."""
