"""The weight bus's control plane as targets: the publisher's ROUTER and a subscriber's DEALER."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

from configs.infrastructure import WeightBus
from tests.security.fuzz.targets import HOST, PATIENCE_S, RUN, DealerTarget, RouterTarget, Target, Vanished
from weight_bus import BusClosed, Publisher, RemovedFromBus, Subscriber
from weight_bus.digest import slice_digest
from weight_bus.messages import TO_PUBLISHER, TO_SUBSCRIBER, Heartbeat

CONFIG = WeightBus(bucket_bytes=1024, deadline_s=1.0, collective_timeout_s=0.5, heartbeat_s=0.2, max_heals=2)
PUBLISH_DRAINS = 20
"""After this many batches of messages the next version goes out."""
WEIGHTS = {"embed": torch.zeros(8, 4), "layer.weight": torch.zeros(4, 4, dtype=torch.bfloat16), "norm": torch.zeros(4)}


def digests(version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return {name: slice_digest(tensor) for name, tensor in tensors}


def nothing(*_: Any) -> None: ...


def no_transport(*_: Any) -> Any:
    """A data plane on which everything arrives at once, as zeros."""
    calls = dict.fromkeys(("form", "label", "broadcast", "finish", "leave", "close"), nothing)
    return SimpleNamespace(device=torch.device("cpu"), facts=dict, serve=lambda: f"{HOST}:1", **calls)


class Threaded(Target):
    """Its reader is a thread, which `poll` is called in."""

    failure: BaseException | None = None
    _sent = 0

    async def drain(self, count: int) -> None:
        self._sent += count
        deadline = time.monotonic() + PATIENCE_S
        while self.read < self._sent:
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > deadline:
                raise Vanished(f"{self._sent - self.read} of {count} messages")
            await asyncio.sleep(0.0005)


class PublisherTarget(Threaded, RouterTarget):
    """Subscribers send rubbish to the publisher while it publishes."""

    kinds = TO_PUBLISHER
    _version = 0

    async def open(self) -> None:
        self._publisher = Publisher(CONFIG, host=HOST, run_id=RUN, incarnation=1, transport_factory=no_transport)
        self.watch(self._publisher._router)
        for name in ("r0.a", "r1.b", "r0.a/beat"):
            self.connect(self._publisher.address, name)
        self._publish()

    def _publish(self) -> None:
        self._publisher.start_publish(self._version, WEIGHTS.items(), digests(self._version, WEIGHTS.items()))
        self._version += 1

    def given(self) -> Mapping[str, Any]:
        known = {"session": f"s{self._turn % 2}", "name": f"r{self._turn % 2}", "instance": f"i{self._turn % 2}"}
        now = {"epoch": self._publisher.epoch, "version": self._version - 1}
        return {**known, **now, "facts": {}, "ranks": 1, "corrupt": [], "differences": [], "limit_s": 0.1}

    async def drain(self, count: int) -> None:
        board = self._publisher._board
        self.failure = board.failure
        await super().drain(count)
        self._drained += 1
        if self._drained % PUBLISH_DRAINS == 0 and board.pending is None:
            self._publish()

    def close(self) -> None:
        self.leave()
        self._context.term()
        self._publisher.close()


class SubscriberTarget(Threaded, DealerTarget):
    """The publisher sends rubbish to a subscriber."""

    kinds = TO_SUBSCRIBER
    _closing = False

    async def open(self) -> None:
        self._subscriber = Subscriber(
            self.address, name="r0", config=CONFIG, host=HOST, run_id=RUN, transport_factory=no_transport
        )
        self.watch(self._subscriber._dealer)
        self._thread = threading.Thread(target=self._receive, name="fuzzed-subscriber", daemon=True)
        self._thread.start()
        self.meet(self._subscriber._dealer, Heartbeat(session=""))
        await self.drain(1)

    def _receive(self) -> None:
        try:
            while not self._closing:
                with contextlib.suppress(BusClosed, RemovedFromBus):  # Goodbye and Removed
                    self._subscriber.receive(digests, activate=nothing, quarantine=nothing)
        except Exception as error:  # noqa: BLE001 - this is what the fuzzer looks for
            self.failure = error

    def given(self) -> Mapping[str, Any]:
        known = self._subscriber.subscription
        return {"session": known.session, "epoch": known.epoch, "rejoin": True}

    def close(self) -> None:
        self._closing = True
        self._subscriber.stop()
        self._thread.join(PATIENCE_S)
        self._subscriber.close()
        super().close()
