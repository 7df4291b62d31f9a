"""`python -m scripts.chaos weights flips --updates 1000 --seed 1 [--delta]`: flipped bits in weight updates.

In one update of --every, a bit of a random byte of a random tensor changes:
wire    in the buckets that have come to one subscriber, or to all of them, as if the publisher had sent them so
staged  in the staging buffer, after its digests were found right and before the engine copies from it
live    in the engine's tensors, after they were loaded and before they are digested
base    in the staging buffer, after the engine has copied from it; only with --delta, which builds on these bytes: it
        shows in the next version, in the staged bytes where its element changes, else in live weights
`found` counts flips that the bus's log names with version and subscriber, `healed` those after which each subscriber
serves that version, bit for bit. What the bus cannot see is counted apart: `at_rest`, bits of live weights that change
after these were proven; they are served until the next version overwrites them.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from configs.infrastructure import WeightBus
from scripts.chaos.bus_cluster import BusCluster, Places, Policy, Receiver
from scripts.chaos.report import State, ends_within

OPTIONS = {
    "updates": (1000, "versions to publish"),
    "every": (50, "one flip in so many updates"),
    "receivers": (2, "subscribers"),
    "delta": (False, "send changes only (weight_bus.delta)"),
}
STARTING_S, PER_VERSION_S = 120.0, 3.0  # before this process takes itself for one that hangs
ALL = "all"
BUCKET_BYTES = 16 * 1024
AT_REST_EVERY = 5.0  # one bit at rest for so many of those that must be found


def plan(args: argparse.Namespace) -> "Flips":
    torch.set_num_threads(1)
    return Flips(args.seed, receivers=args.receivers, delta=args.delta)


def run(campaign: "Flips", state: State, args: argparse.Namespace) -> None:
    if state.done:
        return
    with ends_within(STARTING_S + PER_VERSION_S * args.updates), campaign:
        state.add([campaign.run(args.updates, args.every), campaign.wrong + campaign.oracle.wrong])


def verdict(state: State, _hung: str, _args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    return state.done[0] if state.done else ({}, [])


@dataclass(frozen=True, slots=True)
class Flip:
    """A bit to change. Example: Flip("wire", "receiver-1", "layers.0.q", byte=17, bit=6)"""

    place: str
    victim: str  # name of a subscriber, or `all`, as if the publisher had sent it so
    tensor: str
    byte: int  # within the tensor
    bit: int

    def apply(self, tensor: torch.Tensor, offset: int = 0) -> None:
        """Change the bit in place; `offset` is where the tensor begins in a bucket."""
        data = tensor.view(-1).view(torch.uint8)
        data[(offset + self.byte) % data.numel()] ^= 1 << self.bit


class Flips(BusCluster):
    """A publisher, its subscribers, and flips planted in what goes between them; a context manager."""

    def __init__(self, seed: int, *, receivers: int = 2, delta: bool = False, at_rest_every: float = AT_REST_EVERY):
        # generous, because a busy machine is no fault here
        generous = {"deadline_s": 60, "collective_timeout_s": 20, "heartbeat_s": 5}
        super().__init__(WeightBus(bucket_bytes=BUCKET_BYTES, delta=delta, **generous))
        self._rng, self._delta, self._at_rest_every = random.Random(seed), delta, at_rest_every
        self._policy = Policy(seed, hidden=32)
        self.counts = {what: Counter[str]() for what in ("planted", "found", "healed", "harmless", "at_rest")}
        """By place. Harmless, with --delta: bits of a coded change that carry nothing, or of a base after which a whole
        version came, so that every tensor came out right."""
        self.wrong: list[str] = []
        self._digests_equal = True
        self._names = [f"receiver-{number}" for number in range(receivers)]
        self._due: dict[str, Flip] = {}  # by subscriber, until the place where it belongs takes it, once
        self._late: Flip | None = None
        """A flip of the last version that shows in the next one, mostly among its live weights."""
        self._resting: list[Receiver] = []

    def __enter__(self) -> "Flips":
        super().__enter__()
        for name in self._names:
            self.add(name, partial(self._come, name), spoil=partial(self._load, name))
        return self

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
            "served_corrupt": len(self.oracle.wrong),
            "digests_equal": self._digests_equal,
            "harmless": self.counts["harmless"].total(),
            "at_rest": {what: self.counts["at_rest"][what] for what in ("planted", "found", "served", "overwritten")},
            "seconds": round(time.monotonic() - started, 1),
        }

    def draw(self, *, last: bool) -> Flip:
        places = ["wire", "staged", "live", *(["base"] if self._delta and not last else [])]
        place = self._rng.choice(places)
        victim = self._rng.choice([*self._names, ALL] if place == "wire" else self._names)
        name = self._rng.choice(list(self._policy.last))
        return Flip(place, victim, name, self._rng.randrange(self._policy.last[name].nbytes), self._rng.randrange(8))

    def update(self, planted: Flip | None) -> None:
        oracle, at_rest, last = self.oracle, self.counts["at_rest"], self.publisher.version
        for receiver in self._resting:
            at_rest["served"] += not oracle.holds(last, receiver.live)
            at_rest["found"] += self._names_corrupt(last, [receiver.name])
        self.lines.clear()
        self._due = dict.fromkeys(self._victims(planted), planted) if planted is not None else {}
        version = max(last, 0) + 1
        report = self.publish(version, self._policy.next())
        if report.failed:
            self.wrong.append(f"v{version} did not reach all: {report.failed}")
        due = [self._late, planted]
        self._late = due.pop() if planted is not None and planted.place == "base" else None
        for found in filter(None, due):
            self._judge(version, found)
        for receiver in self._resting:
            at_rest["overwritten"] += self.serves(version, receiver.name)
        self._resting.clear()
        behind = [name for name in self._names if not self.serves(version, name)]
        self.wrong += [f"{name!r} does not hold v{version}" for name in behind]
        self._digests_equal &= not behind

    def _victims(self, flip: Flip) -> list[str]:
        return self._names if flip.victim == ALL else [flip.victim]

    def _come(self, victim: str, _version: int, entries: Places | None, buckets: list[torch.Tensor]) -> None:
        due = self._due.get(victim)
        if due is not None and due.place == "wire":
            # a coded change is one piece, in which tensors have no places
            places = {entry.name: (entry.bucket, entry.offset) for bucket in entries or () for entry in bucket}
            number, offset = places.get(due.tensor, (0, 0))
            self._due.pop(victim).apply(buckets[number], offset)

    def _load(self, victim: str, place: str, name: str, tensor: torch.Tensor) -> None:
        due = self._due.get(victim)
        if due is not None and (due.place, due.tensor) == (place, name):
            self._due.pop(victim).apply(tensor)

    def _judge(self, version: int, planted: Flip) -> None:
        found = self._names_corrupt(version, self._victims(planted))
        healed = all(self.serves(version, name) for name in self._victims(planted))
        counts, place = self.counts, planted.place
        counts["planted"][place] += 1
        if self._delta and healed and not found and not self._due:
            counts["harmless"][place] += 1
            return
        counts["found"][place] += found
        counts["healed"][place] += found and healed
        if not (found and healed):
            self.wrong.append(f"v{version}: {planted} found {found}, healed {healed}")

    def _names_corrupt(self, version: int, subscribers: Iterable[str]) -> bool:
        corrupt = [line for line in self.lines if "corrupt" in line or "change" in line]
        lines = [line for line in corrupt if f"v{version}" in line]
        return all(any(f"'{name}'" in line for line in lines) for name in subscribers)

    def _spoil_at_rest(self) -> None:
        """A bit of the weights that an engine serves; nothing goes on at the bus meanwhile."""
        planted, receiver = self.draw(last=True), self.receivers[self._rng.choice(self._names)]
        planted.apply(receiver.live[planted.tensor])
        self._resting.append(receiver)
        self.counts["at_rest"]["planted"] += 1
