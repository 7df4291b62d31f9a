"""What the weight bus tests share: a small model, a scripted engine, faulty transports, a rollout server thread."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping

import torch

from configs.infrastructure import WeightBus
from weight_bus import BusClosed, Publisher, RemovedFromBus, Subscriber
from weight_bus.digest import slice_digest
from weight_bus.staging import Staging
from weight_bus.transports import Formation, Transport, make_transport
from weight_bus.transports.base import ignore

CONFIG = WeightBus(bucket_bytes=600_000, deadline_s=8.0, collective_timeout_s=1.5, heartbeat_s=0.5, max_heals=2)
RUN = "bus-test"
HOST = "127.0.0.1"

Weights = dict[str, torch.Tensor]


def weights(version: int, *, rows: int = 500, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Five matrices and a scalar-like vector that differ in every version."""
    generator = torch.Generator().manual_seed(version)
    named = {f"layers.{i}.weight": torch.randn(rows, 257, generator=generator).to(dtype) for i in range(5)}
    named["norm.weight"] = torch.randn(33, generator=generator)
    return named


def digests(named: Weights) -> dict[str, int]:
    return {name: slice_digest(tensor) for name, tensor in named.items()}


def until(condition: Callable[[], object], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)


class Engine:
    """Holds copies; `spoil` may change the live tensors after they were applied."""

    def __init__(self, spoil: Callable[[int, Weights], None] | None = None) -> None:
        self.live: Weights = {}
        self.activated: list[int] = []
        self.evaluated: list[int] = []
        self.quarantined: list[tuple[int, str]] = []
        self.loads = 0
        self._spoil = spoil

    def load(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        self.loads += 1
        for name, tensor in named_tensors:
            self.live[name] = tensor.clone()
        if self._spoil is not None:
            self._spoil(version, self.live)
        return digests(self.live)

    def activate(self, version: int, evaluate: bool) -> None:
        self.activated.append(version)
        if evaluate:
            self.evaluated.append(version)

    def quarantine(self, version: int, reason: str) -> None:
        self.quarantined.append((version, reason))


class Faulty:
    """A transport with a fault around the broadcast of one bucket."""

    def __init__(self, inner: Transport, bucket: int, fault: Callable[[torch.Tensor], None], *, before: bool) -> None:
        self._inner = inner
        self._bucket = bucket
        self._fault = fault
        self._before = before

    @property
    def device(self) -> torch.device:
        return self._inner.device

    def facts(self) -> dict[str, str]:
        return self._inner.facts()

    def serve(self) -> str:
        return self._inner.serve()

    def form(self, formation: Formation) -> None:
        self._inner.form(formation)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        if self._before and index == self._bucket:
            self._fault(bucket)
        self._inner.broadcast(bucket, index)
        if not self._before and index == self._bucket:
            self._fault(bucket)

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        self._inner.finish(arrived)

    def leave(self) -> None:
        self._inner.leave()

    def close(self) -> None:
        self._inner.close()


def faulty(
    bucket: int, fault: Callable[[torch.Tensor], None], *, before: bool = False
) -> Callable[[WeightBus, str], Transport]:
    return lambda config, host: Faulty(make_transport(config, host), bucket, fault, before=before)


class Rollout(threading.Thread):
    """A rollout server without an engine to serve: receives until the bus ends."""

    def __init__(
        self,
        publisher: Publisher | str,
        name: str,
        engine: Engine | None = None,
        *,
        factory: Callable[[WeightBus, str], Transport] | None = None,
        config: WeightBus = CONFIG,
        run_id: str = RUN,
        staging: Staging | None = None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.engine = engine or Engine()
        self.ended: BaseException | None = None
        address = publisher if isinstance(publisher, str) else publisher.address
        self.subscriber = Subscriber(
            address, name=name, config=config, host=HOST, run_id=run_id, transport_factory=factory, staging=staging
        )
        self.start()

    def run(self) -> None:
        engine = self.engine
        try:
            while True:
                self.subscriber.receive(engine.load, activate=engine.activate, quarantine=engine.quarantine)
        except (BusClosed, RemovedFromBus) as error:
            self.ended = error
        finally:
            self.subscriber.close()

    def halt(self) -> None:
        self.subscriber.stop()
        self.join(10.0)
        assert not self.is_alive()
