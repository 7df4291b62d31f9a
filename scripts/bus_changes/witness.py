"""A subscriber that holds weights, and who watches it: what it was told to serve, against what was published."""

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch

from configs.infrastructure import WeightBus
from scripts.bus_changes.policy import Weights
from scripts.bus_corruption.observer import bytes_of
from weight_bus import BusClosed, RemovedFromBus, Subscriber
from weight_bus.digest import slice_digest
from weight_bus.transports import TransportFactory

HOST = "127.0.0.1"
RUN = "bus-changes"
KEPT = 64
"""Versions whose bytes are remembered; who activates an older one than that is wrong in any case."""
OTHER_BASE = "comes as a change of"


class Witness:
    """Copies what is published, and compares with it, byte by byte, whatever an engine is told to serve."""

    def __init__(self) -> None:
        self._truth: OrderedDict[int, dict[str, bytes]] = OrderedDict()
        self.activated: dict[str, list[int]] = {}
        """By subscriber, in order."""
        self.wrong: list[str] = []

    def publish(self, version: int, named: Mapping[str, torch.Tensor]) -> None:
        """Copy what is about to be published."""
        self._truth[version] = bytes_of(named)
        if len(self._truth) > KEPT:
            self._truth.popitem(last=False)

    def look(self, name: str, version: int, live: Weights) -> None:
        """An engine is told to serve a version at this moment."""
        before = self.activated.setdefault(name, [])
        if before and version < before[-1]:
            self.wrong.append(f"{name!r} went back from v{before[-1]} to v{version}")
        if not self.holds(version, live):
            self.wrong.append(f"{name!r} serves other bytes under v{version}")
        before.append(version)

    def holds(self, version: int, live: Weights) -> bool:
        """Whether these are the weights of a version, bit for bit."""
        return self._truth.get(version) == bytes_of(live)

    def claims(self, version: int, served: Iterable[str]) -> None:
        """The publisher says that these serve a version; they must have been seen to."""
        for name in served:
            if version not in self.activated.get(name, ()):
                self.wrong.append(f"the publisher takes {name!r} for one that serves v{version}")


class Receiver(threading.Thread):
    """A rollout server without an engine to serve. Removed for good, it starts anew, as its launcher would have it."""

    def __init__(self, address: str, name: str, config: WeightBus, witness: Witness, factory: TransportFactory) -> None:
        super().__init__(name=name, daemon=True)
        self.live: Weights = {}
        self.restarts = 0
        self.closed = ""
        """Why the bus ended."""
        self._address, self._config, self._witness, self._factory = address, config, witness, factory
        self.start()

    def run(self) -> None:
        """Receive until the bus ends."""
        while not self.closed:
            subscriber = Subscriber(
                self._address,
                name=self.name,
                config=self._config,
                host=HOST,
                run_id=RUN,
                transport_factory=self._factory,
            )
            with subscriber:
                try:
                    while True:
                        subscriber.receive(self._load, activate=self._activate, quarantine=self._quarantine)
                except BusClosed as closed:
                    self.closed = str(closed)
                except RemovedFromBus:
                    self.restarts += 1
                    self.live = {}

    def _load(self, _version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        for name, tensor in named_tensors:
            self.live[name] = tensor.clone()
        return {name: slice_digest(tensor) for name, tensor in self.live.items()}

    def _activate(self, version: int, _evaluate: bool) -> None:
        self._witness.look(self.name, version, self.live)

    def _quarantine(self, version: int, reason: str) -> None:
        """Nothing is served here that could be stopped."""


class Heard(logging.Handler):
    """What subscribers refuse, by subscriber and version, as the log of the bus says it."""

    _REFUSED = re.compile(r"'(?P<name>[^']+)': v(?P<version>\d+) (did not arrive|arrived with corrupt)")

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.refused: dict[tuple[str, int], list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what matters."""
        text = record.getMessage()
        found = self._REFUSED.search(text)
        if found is not None:
            self.refused.setdefault((found["name"], int(found["version"])), []).append(text)

    def other_base(self) -> int:
        """How many changes were refused because they belong to another base."""
        return self._count(OTHER_BASE)

    def by_digest(self) -> int:
        """How often everything fitted, and yet the bytes were not what had been published."""
        return self._count("arrived with corrupt")

    def _count(self, words: str) -> int:
        return sum(words in text for texts in list(self.refused.values()) for text in texts)
