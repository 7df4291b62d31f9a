"""The weight bus alone, over gloo: a publisher and its receivers in threads of this process, and weights to publish."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from configs.infrastructure import WeightBus
from scripts.chaos.polling import wait_until
from scripts.chaos.probe import Wrapped, wrapping
from weight_bus import BusClosed, Event, Publisher, PublishReport, RemovedFromBus, Subscriber
from weight_bus.digest import slice_digest
from weight_bus.manifest import Entry
from weight_bus.transports import Transport
from weight_bus.transports.base import ignore

HOST, RUN = "127.0.0.1", "chaos-bus"
KEPT = 64  # versions whose bytes are remembered; an older one that is activated is wrong in any case
END_S = 60.0

Weights = dict[str, torch.Tensor]
Places = Sequence[Sequence[Entry]]
Come = Callable[[int, Places | None, list[torch.Tensor]], None]
"""Called with a version, the tensors of each bucket (None for a change of the version before), and the buckets, which
it may change before they are read."""
Spoil = Callable[[str, str, torch.Tensor], None]

LR = 1e-6  # of the small policy that is published, under a real AdamW
STEPS_BEFORE = 40  # after so many, Adam's moments are those of a run that is under way


def digests_of(named: Weights) -> dict[str, int]:
    return {name: slice_digest(tensor) for name, tensor in named.items()}


def bytes_of(named: Weights) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in named.items()}


class Oracle:
    """Copies what is published, and compares it byte by byte with what an engine is to serve."""

    def __init__(self) -> None:
        self._truth: dict[int, dict[str, bytes]] = {}
        self.activated: defaultdict[str, list[int]] = defaultdict(list)  # by receiver, in order
        self.wrong: list[str] = []

    def publish(self, version: int, named: Weights) -> None:
        self._truth[version] = bytes_of(named)
        self._truth.pop(version - KEPT, None)

    def look(self, name: str, version: int, live: Weights) -> None:
        before, held, true = self.activated[name], bytes_of(live), self._truth.get(version, {})
        if before and version < before[-1]:
            self.wrong.append(f"{name!r} went back from v{before[-1]} to v{version}")
        wrong = [tensor for tensor in {**true, **held} if held.get(tensor) != true.get(tensor)]
        if wrong:
            self.wrong.append(f"{name!r} serves v{version} with a wrong {wrong[0]!r}")
        before.append(version)

    def holds(self, version: int, live: Weights) -> bool:
        return self._truth.get(version) == bytes_of(live)


class SpoiledTransport(Wrapped):
    """A subscriber's transport: `come` is called when all buckets of a version have come."""

    def __init__(self, inner: Transport, come: Come) -> None:
        super().__init__(inner)
        self._come, self._buckets = come, list[torch.Tensor]()

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        self.inner.broadcast(bucket, index)
        self._buckets = [*self._buckets[:index], bucket]  # anew with the first one

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        self.inner.finish(arrived)
        self._come(self.version, self.places, self._buckets)


class Receiver(threading.Thread):
    """A rollout server whose engine holds copies of what it is sent; one that is removed for good starts anew.

    `spoil` is called with place (staged, base, live), tensor name and tensor, as each is loaded.
    """

    def __init__(self, name: str, subscriber: Callable[[], Subscriber], oracle: Oracle, spoil: Spoil) -> None:
        super().__init__(name=name, daemon=True)
        self.live: Weights = {}
        self.removals, self.closed = 0, ""  # why the bus ended
        self._subscriber, self._oracle, self._spoil = subscriber, oracle, spoil

    def run(self) -> None:
        while not self.closed:
            with self._subscriber() as subscriber:
                try:
                    while True:
                        # a quarantined engine serves nothing here that could be stopped
                        subscriber.receive(self._load, activate=self._serve, quarantine=lambda *_: None)
                except BusClosed as closed:
                    self.closed = str(closed)
                except RemovedFromBus:
                    self.removals, self.live = self.removals + 1, {}

    def _load(self, _version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        for name, tensor in named_tensors:
            self._spoil("staged", name, tensor)
            self.live[name] = tensor.clone()
            self._spoil("base", name, tensor)
            self._spoil("live", name, self.live[name])
        return digests_of(self.live)

    def _serve(self, version: int, _evaluate: bool) -> None:
        self._oracle.look(self.name, version, self.live)


class BusCluster(logging.Handler):
    """A publisher, its receivers in threads, an oracle, and what the bus logs here; a context manager."""

    def __init__(self, config: WeightBus) -> None:
        super().__init__(logging.INFO)
        self.config, self.oracle = config, Oracle()
        self.lines: list[str] = []  # of the log
        self.events: list[Event] = []
        self.receivers: dict[str, Receiver] = {}
        self._logger = logging.getLogger("weight_bus")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> "BusCluster":
        self._logged_from = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        self.publisher = Publisher(self.config, host=HOST, run_id=RUN, incarnation=1)
        self.publisher.on_event.append(self.events.append)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._logger.setLevel(self._logged_from)
        self._logger.removeHandler(self)

    def end(self) -> None:
        self.publisher.close()
        for receiver in self.receivers.values():
            receiver.join(END_S)

    def add(self, name: str, come: Come, *, address: str = "", spoil: Spoil = lambda *_: None) -> None:
        options: dict[str, Any] = {"name": name, "config": self.config, "host": HOST, "run_id": RUN}
        data = wrapping(SpoiledTransport, come)
        subscriber = partial(Subscriber, address or self.publisher.address, transport_factory=data, **options)
        self.receivers[name] = Receiver(name, subscriber, self.oracle, spoil)
        self.receivers[name].start()
        self.wait(lambda: name in self.publisher.members(), f"{name!r} has joined", END_S)

    def publish(self, version: int, named: Weights) -> PublishReport:
        self.oracle.publish(version, named)
        return self.publisher.publish(version, named.items(), digests_of(named))

    def serves(self, version: int, name: str) -> bool:
        """Whether a receiver was told to serve a version last, and holds it now."""
        newest = self.oracle.activated[name][-1:]
        return newest == [version] and self.oracle.holds(version, self.receivers[name].live)

    def wait(self, condition: Callable[[], object], what: str, deadline_s: float) -> None:
        wait_until(condition, what, deadline_s, state=lambda: f"members {self.publisher.members()}")


class Policy:
    """Trains on noise: how many elements a step changes depends on the learning rate and on Adam's moments.

    Master weights are float32. Vectors and `gate` are published as they are, the others in bfloat16.
    """

    def __init__(self, seed: int, *, hidden: int) -> None:
        self._numbers = torch.Generator().manual_seed(seed)
        shapes = {"embed": (8 * hidden, hidden), "gate": (17, 19)}
        shapes |= {f"layers.{layer}.{matrix}": (hidden, hidden) for layer in range(4) for matrix in "qkvo"}
        named = {name: torch.randn(shape, generator=self._numbers) * 0.02 for name, shape in shapes.items()}
        named |= {f"layers.{layer}.norm": torch.ones(hidden) for layer in range(4)} | {"scale": torch.ones(1)}
        self._masters = {name: torch.nn.Parameter(tensor) for name, tensor in named.items()}
        self._adam = torch.optim.AdamW(self._masters.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
        for _ in range(STEPS_BEFORE):
            self._step()
        self.last = self._rounded()

    def next(self) -> Weights:
        """Tensors as they are published after one more step, which stay as they are."""
        self._step()
        self.last = self._rounded()
        return self.last

    def _step(self) -> None:
        for weight in self._masters.values():
            weight.grad = torch.randn(weight.shape, generator=self._numbers)
        self._adam.step()

    def _rounded(self) -> Weights:
        kept = {name: weight.ndim < 2 or name == "gate" for name, weight in self._masters.items()}
        dtypes = {name: torch.float32 if keep else torch.bfloat16 for name, keep in kept.items()}
        return {name: weight.detach().to(dtypes[name], copy=True) for name, weight in self._masters.items()}
