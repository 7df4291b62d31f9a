"""A publisher and its subscribers in one process, flipped bits between them, and what became of each."""

import random
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from configs.infrastructure import WeightBus
from scripts.chaos.bus_cluster import BusCluster, Receiver
from scripts.chaos.campaigns.policy import Policy
from scripts.chaos.probe import Wrapped, wrapping
from weight_bus.manifest import Manifest, plan
from weight_bus.transports import Transport

ALL = "all"
BUCKET_BYTES = 16 * 1024
JOIN_S = 60.0
AT_REST_EVERY = 5.0
"""One bit at rest for so many of those that must be found."""


@dataclass(frozen=True, slots=True)
class Flip:
    """A bit to change. Example: Flip("wire", "receiver-1", "layers.0.q", byte=17, bit=6)"""

    place: str
    victim: str
    """Name of a subscriber, or `all`: the publisher sends it to each of them."""
    tensor: str
    byte: int
    """Within the tensor."""
    bit: int

    def apply(self, tensor: torch.Tensor, offset: int = 0) -> None:
        """Change the bit in place; `offset` is where the tensor begins in a bucket."""
        data = tensor.view(-1).view(torch.uint8)
        data[(offset + self.byte) % data.numel()] ^= 1 << self.bit


class Saboteur:
    """Holds the flip that is due, until the place where it belongs takes it, once."""

    def __init__(self, layout: Manifest, *, delta: bool) -> None:
        self._places = {entry.name: (entry.bucket, entry.offset) for entry in layout.entries}
        self._delta = delta
        self._lock = threading.Lock()
        self.due: Flip | None = None

    def take(self, place: str, victim: str) -> Flip | None:
        """The flip, if it is meant for here."""
        with self._lock:
            found = self.due
            if found is None or (found.place, found.victim) != (place, victim):
                return None
            self.due = None
            return found

    def spoil(self, victim: str, place: str, name: str, tensor: torch.Tensor) -> None:
        """Change a tensor beside or in the engine of a subscriber, if that is due."""
        due = self.due
        if due is not None and due.tensor == name and self.take(place, victim) is not None:
            due.apply(tensor)

    def spoil_wire(self, victim: str, bucket: torch.Tensor, index: int) -> None:
        """Change what is on the wire, if that is due. A coded change is one piece, in which tensors have no places."""
        due = self.due
        if due is None:
            return
        at, offset = self._places[due.tensor]
        if index == (0 if self._delta else at) and self.take("wire", victim) is not None:
            due.apply(bucket, offset)


class SpoiledTransport(Wrapped):
    """A transport on which bits may flip: at a subscriber after they have come, at the publisher in a copy."""

    def __init__(self, inner: Transport, saboteur: Saboteur, victim: str) -> None:
        super().__init__(inner)
        self._saboteur, self._victim = saboteur, victim

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        if self._victim == ALL:
            bucket = bucket.clone()  # what the publisher keeps for resends stays right
            self._saboteur.spoil_wire(ALL, bucket, index)
        super().broadcast(bucket, index)
        if self._victim != ALL:
            self._saboteur.spoil_wire(self._victim, bucket, index)


class Flips:
    """A publisher, its subscribers, and flips planted in what goes between them; a context manager."""

    def __init__(self, seed: int, *, receivers: int = 2, delta: bool = False, at_rest_every: float = AT_REST_EVERY):
        self._rng = random.Random(seed)
        options: dict[str, Any] = {"delta": True} if delta else {}
        # generous, because a busy machine is no fault here
        config = WeightBus(bucket_bytes=BUCKET_BYTES, deadline_s=60, collective_timeout_s=20, heartbeat_s=5, **options)
        self._delta, self._at_rest_every = delta, at_rest_every
        self._policy = Policy(seed, hidden=32, layers=2, kinds={"step": 1})
        described = [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self._policy.last.items()]
        self.saboteur = Saboteur(plan(described, BUCKET_BYTES), delta=delta)
        self.bus = BusCluster(config, transport_factory=wrapping(SpoiledTransport, self.saboteur, ALL))
        self.counts = {what: Counter[str]() for what in ("planted", "found", "healed", "harmless", "at_rest")}
        """By place. Harmless, with --delta: bits of a coded change that carry nothing, or of a base after which a whole
        version came, so that every tensor came out right."""
        self.wrong: list[str] = []
        self._digests_equal = True
        self._names = [f"receiver-{number}" for number in range(receivers)]
        self._late: Flip | None = None
        """A flip of the last version that shows in the next one, mostly among its live weights."""
        self._resting: list[Receiver] = []

    def __enter__(self) -> "Flips":
        self.bus.__enter__()
        for name in self._names:
            spoil = partial(self.saboteur.spoil, name)
            factory = wrapping(SpoiledTransport, self.saboteur, name)
            self.bus.add(name, transport_factory=factory, spoil=spoil)
        members = self.bus.publisher.members
        self.bus.wait(lambda: len(members()) == len(self._names), f"all of {self._names} have joined", JOIN_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.bus.__exit__()

    def run(self, updates: int, every: int) -> dict[str, Any]:
        """`updates` versions, with one flip at a random moment of each `every` of them; what came of it, JSON."""
        started = time.monotonic()
        due = {first + self._rng.randrange(every) for first in range(1, updates + 1, every)}
        # what the log says of these versions is about others
        told = due | {v + 1 for v in due} if self._delta else due
        chance = 1 / (every * self._at_rest_every)
        resting = {v for v in range(1, updates) if v not in told and self._rng.random() < chance}
        for version in range(1, updates + 1):
            self.update(self.draw(last=version == updates) if version in due else None)
            if version in resting:
                self._spoil_at_rest()
        return {
            "updates": updates,
            "planted": dict(self.counts["planted"]),
            "found": self.counts["found"].total(),
            "healed": self.counts["healed"].total(),
            "served_corrupt": len(self.bus.oracle.wrong),
            "digests_equal": self._digests_equal,
            "harmless": self.counts["harmless"].total(),
            "at_rest": {what: self.counts["at_rest"][what] for what in ("planted", "found", "served", "overwritten")},
            "seconds": round(time.monotonic() - started, 1),
        }

    @property
    def is_in_order(self) -> bool:
        """Whether all was found, all healed and none served."""
        planted, found, healed, harmless, _ = (counts.total() for counts in self.counts.values())
        return found == healed == planted - harmless and self._digests_equal and not self.bus.oracle.wrong

    def draw(self, *, last: bool) -> Flip:
        """Place, subscriber, tensor, byte and bit at random."""
        places = ["wire", "staged", "live", *(["base"] if self._delta and not last else [])]
        place = self._rng.choice(places)
        victim = self._rng.choice([*self._names, ALL] if place == "wire" else self._names)
        name = self._rng.choice(list(self._policy.last))
        return Flip(place, victim, name, self._rng.randrange(self._policy.last[name].nbytes), self._rng.randrange(8))

    def update(self, planted: Flip | None) -> None:
        """Publish the next version, wait until all serve it, and look at what was planted."""
        version, oracle, at_rest = self.bus.next_version, self.bus.oracle, self.counts["at_rest"]
        for receiver in self._resting:
            at_rest["served"] += not oracle.holds(version - 1, receiver.live)
            at_rest["found"] += self._names_corrupt(version - 1, [receiver.name])
        self.bus.log.lines.clear()
        self.saboteur.due = planted
        self.bus.start_publish(self._policy.next()[1])
        report = self.bus.publisher.wait()
        if report.failed:
            self.wrong.append(f"v{version} did not reach all: {report.failed}")
        due = [self._late, planted]
        self._late = due.pop() if planted is not None and planted.place == "base" else None
        for found in due:
            if found is not None:
                self._judge(version, found)
        for receiver in self._resting:
            at_rest["overwritten"] += self.bus.serves(version, receiver.name)
        self._resting.clear()
        self._digests_equal &= all(self.bus.serves(version, name) for name in self._names)

    def _judge(self, version: int, planted: Flip) -> None:
        """Whether a flip was found, and healed."""
        victims = self._names if planted.victim == ALL else [planted.victim]
        found = self._names_corrupt(version, victims)
        healed = all(self.bus.serves(version, name) for name in victims)
        counts, place = self.counts, planted.place
        counts["planted"][place] += 1
        if self._delta and healed and not found and self.saboteur.due is None:
            counts["harmless"][place] += 1
            return
        counts["found"][place] += found
        counts["healed"][place] += found and healed
        if not (found and healed):
            self.wrong.append(f"v{version}: {planted} found {found}, healed {healed}")

    def _names_corrupt(self, version: int, subscribers: Iterable[str]) -> bool:
        """Whether lines of something corrupt name this version and each of these subscribers."""
        corrupt = [line for line in self.bus.log.lines if "corrupt" in line or "change" in line]
        lines = [line for line in corrupt if f"v{version}" in line]
        return all(any(f"'{name}'" in line for line in lines) for name in subscribers)

    def _spoil_at_rest(self) -> None:
        """A bit of the weights that an engine serves; nothing goes on at the bus meanwhile."""
        planted, receiver = self.draw(last=True), self.bus.receivers[self._rng.choice(self._names)]
        planted.apply(receiver.live[planted.tensor])
        self._resting.append(receiver)
        self.counts["at_rest"]["planted"] += 1
