"""The weight bus alone, over gloo: a publisher in this process, and receivers as threads or as processes."""

import hashlib
import logging
import multiprocessing
import os
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from configs.infrastructure import WeightBus
from replay.lifeline import die_with_parent
from scripts.chaos.polling import wait_until
from scripts.chaos.probe import Recorder, bus_subscriber, halfway
from weight_bus import BusClosed, Event, Publisher, RemovedFromBus, Subscriber
from weight_bus.digest import slice_digest

FORKS = multiprocessing.get_context("forkserver")
"""Importing torch anew for each receiver would take longer than most faults."""
HOST, RUN = "127.0.0.1", "chaos-bus"
KEPT = 64  # versions whose bytes are remembered; an older one that is activated is wrong in any case
END_S = 60.0

Weights = dict[str, torch.Tensor]


def digests_of(named: Weights) -> dict[str, int]:
    return {name: slice_digest(tensor) for name, tensor in named.items()}


def bytes_of(named: Weights) -> dict[str, bytes]:
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in named.items()}


def bytes_digest(named: Weights) -> str:
    """Of all bytes by name; shares nothing with the digests of the bus."""
    state = hashlib.blake2b(digest_size=16)
    for name, data in sorted(bytes_of(named).items()):
        state.update(name.encode() + data)
    return state.hexdigest()


class Oracle:
    """Copies what is published, and compares it byte by byte with what an engine is to serve."""

    def __init__(self) -> None:
        self._truth: OrderedDict[int, dict[str, bytes]] = OrderedDict()
        self.activated: defaultdict[str, list[int]] = defaultdict(list)  # by receiver, in order
        self.wrong: list[str] = []

    def publish(self, version: int, named: Weights) -> None:
        """Copy what is about to be published."""
        self._truth[version] = bytes_of(named)
        if len(self._truth) > KEPT:
            self._truth.popitem(last=False)

    def look(self, name: str, version: int, live: Weights) -> None:
        """An engine is to serve a version from now on."""
        before, held, true = self.activated[name], bytes_of(live), self._truth.get(version, {})
        if before and version < before[-1]:
            self.wrong.append(f"{name!r} went back from v{before[-1]} to v{version}")
        wrong = [tensor for tensor in {**true, **held} if held.get(tensor) != true.get(tensor)]
        if wrong:
            self.wrong.append(f"{name!r} serves v{version} with a wrong {wrong[0]!r}")
        before.append(version)

    def holds(self, version: int, live: Weights) -> bool:
        """Whether these are the weights of a version, bit for bit."""
        return self._truth.get(version) == bytes_of(live)

    def claims(self, version: int, served: Iterable[str]) -> None:
        """The publisher says that these serve a version."""
        false = [name for name in served if version not in self.activated[name]]
        self.wrong += [f"the publisher takes {name!r} for one that serves v{version}" for name in false]


class Receiver(threading.Thread):
    """A rollout server whose engine holds copies of what it is sent.

    `observe` is called with name, version and live weights when the engine is to serve a version; `spoil` with place
    (staged, base, live), tensor name and tensor, as each is loaded. With `restarts`, one that is removed for good
    starts anew, as its launcher would have it.
    """

    def __init__(
        self,
        address: str,
        name: str,
        config: WeightBus,
        observe: Callable[[str, int, Weights], None],
        *,
        make: type[Subscriber] = Subscriber,
        spoil: Callable[[str, str, torch.Tensor], None] = lambda *_: None,
        restarts: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.live: Weights = {}
        self.removals, self.closed = 0, ""  # why the bus ended
        self._subscriber = lambda: make(address, name=name, config=config, host=HOST, run_id=RUN, **options)
        self._observe, self._spoil, self._restarts = observe, spoil, restarts

    def run(self) -> None:
        while not self.closed:
            with self._subscriber() as subscriber:
                try:
                    while True:
                        # a quarantined engine serves nothing here that could be stopped
                        subscriber.receive(self._load, activate=self._activate, quarantine=lambda *_: None)
                except BusClosed as closed:
                    self.closed = str(closed)
                except RemovedFromBus as removed:
                    self.removals, self.live = self.removals + 1, {}
                    self.closed = "" if self._restarts else str(removed)

    def _load(self, _version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
        for name, tensor in named_tensors:
            self._spoil("staged", name, tensor)
            self.live[name] = tensor.clone()
            self._spoil("base", name, tensor)
            self._spoil("live", name, self.live[name])
        return digests_of(self.live)

    def _activate(self, version: int, _evaluate: bool) -> None:
        self._observe(self.name, version, self.live)


class BusCluster(logging.Handler):
    """A publisher, its receivers in threads, an oracle, and what the bus logs here; a context manager."""

    def __init__(self, config: WeightBus, **options: Any) -> None:
        super().__init__(logging.INFO)
        self.config, self._options, self.oracle = config, options, Oracle()
        self.lines: list[str] = []  # of the log
        self.removed: list[Event] = []
        self.receivers: dict[str, Receiver] = {}
        self._logger = logging.getLogger("weight_bus")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> "BusCluster":
        self._logged_from = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        self.publisher = Publisher(self.config, host=HOST, run_id=RUN, incarnation=1, **self._options)
        self.publisher.on_event.append(lambda event: self.removed.append(event) if event.kind == "removed" else None)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._logger.setLevel(self._logged_from)
        self._logger.removeHandler(self)

    def end(self) -> None:
        """End the publisher, and with it the receivers."""
        self.publisher.close()
        for receiver in self.receivers.values():
            receiver.join(END_S)

    def add(self, name: str, *, address: str = "", **options: Any) -> None:
        address = address or self.publisher.address
        self.receivers[name] = Receiver(address, name, self.config, self.oracle.look, **options)
        self.receivers[name].start()

    def wait_for_all(self) -> None:
        """Wait until all receivers have joined. Raises Hung."""
        names = set(self.receivers)
        self.wait(lambda: names <= self.publisher.members().keys(), f"{sorted(names)} have joined", END_S)

    @property
    def next_version(self) -> int:
        return max(self.publisher.version, 0) + 1

    def start_publish(self, named: Weights, *, reach: Callable[[], None] = lambda: None) -> int:
        """Hand the next version to the bus; `reach` is called when half of it is put together. The version."""
        version = self.next_version
        self.oracle.publish(version, named)
        self.publisher.start_publish(version, halfway(list(named.items()), reach), digests_of(named))
        return version

    def serves(self, version: int, name: str) -> bool:
        """Whether a receiver was told to serve a version last, and holds it now."""
        newest = self.oracle.activated[name][-1:]
        return newest == [version] and self.oracle.holds(version, self.receivers[name].live)

    def wait(self, condition: Callable[[], object], what: str, deadline_s: float) -> None:
        wait_until(condition, what, deadline_s, state=lambda: f"members {self.publisher.members()}")


def start_receiver(address: str, config: WeightBus, name: str, folder: Path) -> int:
    """A receiver with a probe in a process of its own; its pid. It ends with this process."""
    FORKS.set_forkserver_preload([__name__])
    process = FORKS.Process(target=receive, args=(address, config.model_dump_json(), name, folder), daemon=True)
    process.start()
    assert process.pid is not None
    return process.pid


def receive(address: str, config: str, name: str, folder: Path) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    logging.basicConfig(filename=folder / "receiver.log", format="%(asctime)s %(message)s", level=logging.INFO)
    recorder = Recorder(folder)

    def observe(_: str, version: int, live: Weights) -> None:
        recorder.note("live", version=version, pid=os.getpid(), digest=bytes_digest(live))

    made = WeightBus.model_validate_json(config)
    Receiver(address, name, made, observe, make=bus_subscriber(recorder), restarts=False).run()
