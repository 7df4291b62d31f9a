"""A publisher and its subscribers in one process, the flips between them, and what became of each."""

import logging
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from configs.infrastructure import WeightBus
from scripts.bus_corruption.flips import ALL, Flip, Saboteur, flip, wires
from scripts.bus_corruption.observer import Heard, Observer
from scripts.bus_corruption.receiver import BUCKET_BYTES, HOST, RUN, Receiver, layout_of, model, step
from weight_bus import Publisher
from weight_bus.digest import slice_digest

JOIN_S = 60.0
AT_REST_EVERY = 5
"""One bit at rest for so many of those that must be found."""


@dataclass(slots=True)
class Counts:
    """What was planted, and what became of it."""

    updates: int = 0
    planted: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    healed: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    """With --delta: bits of a coded change that carry nothing, or of a base after which a whole version came, so that
    every tensor came out right."""
    at_rest: Counter[str] = field(default_factory=Counter)
    served_corrupt: int = 0
    digests_equal: bool = True
    """After every update all engines held what was published, bit for bit."""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The last line of the output."""
        return {
            "updates": self.updates,
            "planted": dict(self.planted),
            "found": self.found.total(),
            "healed": self.healed.total(),
            "served_corrupt": self.served_corrupt,
            "digests_equal": self.digests_equal,
            "harmless": self.harmless.total(),
            "at_rest": {what: self.at_rest[what] for what in ("planted", "found", "served", "overwritten")},
            "seconds": round(self.seconds, 1),
        }

    @property
    def in_order(self) -> bool:
        """Whether all was found, all healed and none served."""
        due = self.planted.total() - self.harmless.total()
        whole = self.found.total() == self.healed.total() == due
        return whole and self.served_corrupt == 0 and self.digests_equal


class Bench:
    """A publisher, its subscribers, and flips planted in what goes between them; a context manager."""

    def __init__(self, seed: int, *, receivers: int = 2, delta: bool = False) -> None:
        self._rng, self._numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        options: dict[str, Any] = {"delta": True} if delta else {}
        # generous, because a busy machine is no fault here
        self._config = WeightBus(
            bucket_bytes=BUCKET_BYTES, deadline_s=60, collective_timeout_s=20, heartbeat_s=5, **options
        )
        self._delta = delta
        self._named = model(self._numbers)
        self._saboteur = Saboteur(layout_of(self._named), delta=delta)
        self.observer, self._heard, self.counts = Observer(), Heard(), Counts()
        self._names = [f"receiver-{number}" for number in range(receivers)]
        self._late: Flip | None = None
        """A flip of the last version that shows in the next one, mostly among its live weights."""
        self._resting: list[Receiver] = []

    def __enter__(self) -> "Bench":
        self._log = logging.getLogger("weight_bus")
        self._log.addHandler(self._heard)
        factory = wires(self._saboteur, ALL)
        self._publisher = Publisher(self._config, host=HOST, run_id=RUN, incarnation=1, transport_factory=factory)
        address = self._publisher.address
        self._receivers = {
            name: Receiver(address, name, self._config, self._saboteur, self.observer) for name in self._names
        }
        deadline = time.monotonic() + JOIN_S
        while len(self._publisher.members()) < len(self._receivers):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all of {self._names} joined within {JOIN_S:.0f} s")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._publisher.close()
        for receiver in self._receivers.values():
            receiver.join(JOIN_S)
        self._log.removeHandler(self._heard)

    def run(self, updates: int, every: int) -> Counts:
        """`updates` versions, with one flip at a random moment of each `every` of them."""
        started = time.monotonic()
        due = {first + self._rng.randrange(every) for first in range(1, updates + 1, every)}
        # what is heard of these versions is about others
        told = due | {v + 1 for v in due} if self._delta else due
        resting = {v for v in range(1, updates) if v not in told and self._rng.random() < 1 / (every * AT_REST_EVERY)}
        for version in range(1, updates + 1):
            planted = self.draw(last=version == updates) if version in due else None
            self.update(version, planted)
            if version in resting:
                self._spoil_at_rest()
        counts = self.counts
        counts.updates, counts.served_corrupt = updates, len(self.observer.served_corrupt)
        counts.seconds = time.monotonic() - started
        return counts

    def draw(self, *, last: bool) -> Flip:
        """Place, subscriber, tensor, byte and bit at random."""
        places = ["wire", "staged", "live", *(["base"] if self._delta and not last else [])]
        place = self._rng.choice(places)
        victim = self._rng.choice([*self._names, ALL] if place == "wire" else self._names)
        name = self._rng.choice(list(self._named))
        return Flip(place, victim, name, self._rng.randrange(self._named[name].nbytes), self._rng.randrange(8))

    def update(self, version: int, planted: Flip | None) -> None:
        """Publish the next version, wait until all serve it, and look at what was planted."""
        for receiver in self._resting:
            self.counts.at_rest["served"] += not self.observer.holds(version - 1, receiver.live)
            self.counts.at_rest["found"] += self._heard.names(version - 1, [receiver.name])
        self._named = step(self._named, self._numbers)
        self.observer.publish(version, self._named)
        self._heard.lines.clear()
        self._saboteur.due = planted
        digests = {name: slice_digest(tensor) for name, tensor in self._named.items()}
        report = self._publisher.publish(version, self._named.items(), digests)
        if report.failed:
            print(f"WRONG: v{version} did not reach all: {report.failed}", flush=True)
        due = [self._late, planted]
        self._late = None
        if planted is not None and planted.place == "base":
            self._late = due.pop()
        for found in due:
            if found is not None:
                self._judge(version, found)
        for receiver in self._resting:
            self.counts.at_rest["overwritten"] += self._serves(version, receiver.name)
        self._resting.clear()
        self.counts.digests_equal &= all(self._serves(version, name) for name in self._names)

    def _judge(self, version: int, planted: Flip) -> None:
        """Whether a flip was found, and healed."""
        victims = self._names if planted.victim == ALL else [planted.victim]
        found = self._heard.names(version, victims)
        healed = all(self._serves(version, name) for name in victims)
        counts, place = self.counts, planted.place
        counts.planted[place] += 1
        if self._delta and healed and not found and self._saboteur.due is None:
            counts.harmless[place] += 1
            return
        counts.found[place] += found
        counts.healed[place] += found and healed
        if not (found and healed):
            print(f"WRONG: v{version}: {planted} found {found}, healed {healed}", flush=True)

    def _serves(self, version: int, name: str) -> bool:
        """Whether an engine was told to serve a version, held it then, and holds it now."""
        told = self.observer.served.get(name) == (version, True)
        return told and self.observer.holds(version, self._receivers[name].live)

    def _spoil_at_rest(self) -> None:
        """A bit of the weights that an engine serves; nothing goes on at the bus meanwhile."""
        planted, receiver = self.draw(last=True), self._receivers[self._rng.choice(self._names)]
        flip(receiver.live[planted.tensor], planted.byte, planted.bit)
        self._resting.append(receiver)
        self.counts.at_rest["planted"] += 1
