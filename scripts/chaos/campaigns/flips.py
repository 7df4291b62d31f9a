"""`python -m scripts.chaos flips --updates 1000 --seed 1 [--delta]`: flipped bits in weight updates.

A publisher and two servers of the weight bus, over gloo. In every second update one bit of a random byte changes:
wire    in a bucket that has come to one server, or to both, as if the publisher had sent it so
staged  in the staging buffer, after its digest was found right and before the engine copies from it
live    in the engine's weights, after they were loaded and before they are digested
base    in the staging buffer, after the engine has copied from it; with --delta, which makes the next version of it
rest    in the engine's weights between two updates, which no digest looks at: these are counted apart, as `at_rest`
`found` counts flips that the bus names with version and server, `healed` those after which both servers hold what was
published byte by byte, `served_corrupt` versions that an engine was to serve with other bytes.
"""

import argparse
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch

from configs.infrastructure import WeightBus
from scripts.chaos.polling import Ended, wait_until
from scripts.chaos.report import State
from weight_bus import BusClosed, Event, Publisher, Subscriber
from weight_bus.digest import slice_digest
from weight_bus.transports import Transport, make_transport

OPTIONS: dict[str, tuple[Any, str]] = {
    "updates": (1000, "versions to publish"),
    "delta": (False, "versions travel as changes (weight_bus.delta)"),
}
HOST, RUN, SERVERS = "127.0.0.1", "chaos-flips", ("rollout-0", "rollout-1")
# generous, because a busy machine is no fault here
CONFIG = WeightBus(bucket_bytes=64 * 1024, deadline_s=60, collective_timeout_s=20, heartbeat_s=5)
BUCKETS = 3  # of a whole version; a change is one

Weights = dict[str, torch.Tensor]
Spoil = Callable[[str, str, torch.Tensor], None]  # place, number of the bucket or name of the tensor, and its bytes


def plan(args: argparse.Namespace) -> "Flips":
    torch.set_num_threads(1)
    return Flips(args.seed, delta=args.delta)


def run(flips: "Flips", state: State, args: argparse.Namespace) -> None:
    if not state.done:
        with flips:
            state.add([flips.run(args.updates), flips.wrong])


def verdict(state: State, hung: str, _args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    return state.done[0] if state.done else ({"ended_early": hung}, [])


def digests(named: Weights) -> dict[str, int]:
    return {name: slice_digest(tensor) for name, tensor in named.items()}


def stepped(named: Weights, version: int, share: float = 0.01) -> Weights:
    """A step of training: this share of the elements, by a unit in the last place."""
    rng = torch.Generator().manual_seed(version)
    after = {}
    for name, tensor in named.items():
        bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        after[name] = (bits + (torch.rand(bits.shape, generator=rng) < share).to(bits.dtype)).view(tensor.dtype)
    return after


class Server(threading.Thread):
    """A rollout server whose engine holds copies; `spoil` sees all bytes on their way, `look` what it is to serve."""

    def __init__(self, name: str, config: WeightBus, address: str, spoil: Spoil, look: Callable[..., None]) -> None:
        super().__init__(name=name, daemon=True)
        self.live: Weights = {}
        self._spoil, self._look = spoil, look
        options: dict[str, Any] = {"name": name, "config": config, "host": HOST, "run_id": RUN}
        self._subscriber = Subscriber(address, transport_factory=self._transport, **options)
        self.start()

    def run(self) -> None:
        with suppress(BusClosed), self._subscriber as subscriber:
            while True:
                subscriber.receive(self._load, activate=partial(self._look, self), quarantine=lambda *_: None)

    def _transport(self, config: WeightBus, host: str) -> Transport:
        made = make_transport(config, host)
        anything: Any = made
        broadcast = made.broadcast
        anything.broadcast = lambda bucket, index: (broadcast(bucket, index), self._spoil("wire", str(index), bucket))
        return made

    def _load(self, _version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        for name, tensor in named_tensors:
            self._spoil("staged", name, tensor)
            self.live[name] = tensor.clone()
            self._spoil("base", name, tensor)
            self._spoil("live", name, self.live[name])
        return digests(self.live)


class Flips(ExitStack):
    """The publisher, its servers, and the flips that are planted between them; a context manager."""

    def __init__(self, seed: int, *, delta: bool) -> None:
        super().__init__()
        self._rng, self._delta, self._config = random.Random(seed), delta, CONFIG.model_copy(update={"delta": delta})
        numbers = torch.Generator().manual_seed(seed)
        self._truth = {f"layers.{i}": torch.randn(64, 256, generator=numbers).bfloat16() for i in range(5)}
        self._truth["norm"] = torch.randn(64, generator=numbers)
        self._version, self._events, self._due = -1, list[Event](), dict[str, tuple[str, str]]()
        self.places = ("wire", "staged", "live", "rest", *["base"] * delta)
        self.counts = {what: Counter[str]() for what in ("planted", "found", "healed", "harmless")}  # by place
        self.served_corrupt, self.wrong = 0, list[str]()

    def __enter__(self) -> "Flips":
        publisher = self._publisher = Publisher(self._config, host=HOST, run_id=RUN, incarnation=1)
        publisher.on_event.append(self._events.append)
        arguments = self._config, publisher.address
        self.servers = {name: Server(name, *arguments, partial(self._spoil, name), self._look) for name in SERVERS}
        for server in self.servers.values():
            self.callback(server.join, 20.0)
        self.enter_context(publisher)  # closed first
        wait_until(lambda: publisher.members().keys() == set(SERVERS), "both servers have joined", 60.0)
        self._publish()
        return self

    def run(self, updates: int) -> dict[str, Any]:
        """So many versions after the first, a flip in one of two; what came of them, JSON."""
        started = time.monotonic()
        for _ in range(0, updates, 2):
            self.plant(self._rng.choice(self.places))
        rest = {what: counts.pop("rest", 0) for what, counts in self.counts.items()}
        return {
            "updates": self._version,
            "planted": dict(self.counts["planted"]),
            **{what: self.counts[what].total() for what in ("found", "healed", "harmless")},
            "served_corrupt": self.served_corrupt,
            "at_rest": {"planted": rest["planted"], "found": rest["found"], "overwritten": rest["healed"]},
            "seconds": round(time.monotonic() - started, 1),
        }

    def plant(self, place: str) -> None:
        """Publish a version with a flip there and one without; judge what the bus says and what the engines hold."""
        rng, server, at_rest = self._rng, self._rng.choice(SERVERS), place == "rest"
        hit, where = {server}, rng.choice([*self._truth])
        if place == "wire":
            hit, where = rng.choice([hit, set(SERVERS)]), str(rng.randrange(1 if self._delta else BUCKETS))
        self._events.clear()
        shows = self._version + (2 if place in ("base", "rest") else 1)
        self._due = dict.fromkeys(hit, (place, where))
        healed = self._publish()
        if at_rest:
            self._spoil(server, place, where, self.servers[server].live[where])
            healed &= not self._holds(self.servers[server])
        healed &= self._publish() and not self._due
        named = {(event.name, event.version) for event in self._events if event.kind in ("corrupt", "quarantined")}
        # bits of a change that carry nothing, or of a base after which the next version came whole
        harmless = self._delta and place in ("wire", "base") and not named
        for what, holds in (("planted", True), ("found", named), ("healed", healed), ("harmless", harmless)):
            self.counts[what][place] += bool(holds)
        if not healed or named != ({(name, shows) for name in hit} if not (at_rest or harmless) else set()):
            self.wrong.append(f"v{shows}: {place} {where!r} of {hit}: healed {healed}, the bus names {named}")

    def _publish(self) -> bool:
        """The next version; whether all hold it."""
        self._version, self._truth = self._version + 1, stepped(self._truth, self._version)
        report = self._publisher.publish(self._version, self._truth.items(), digests(self._truth))
        if report.failed:
            raise Ended(f"v{self._version} did not reach all: {report.failed}")
        return all(map(self._holds, self.servers.values()))

    def _spoil(self, name: str, place: str, where: str, tensor: torch.Tensor) -> None:
        if self._due.get(name) == (place, where):
            del self._due[name]
            data = tensor.view(-1).view(torch.uint8)
            data[self._rng.randrange(data.numel())] ^= 1 << self._rng.randrange(8)

    def _look(self, server: Server, version: int, _evaluate: bool) -> None:
        if version != self._version or not self._holds(server):
            self.served_corrupt += 1
            self.wrong.append(f"v{version}: {server.name!r} serves other bytes than were published")

    def _holds(self, server: Server) -> bool:
        live, true = ({n: bytes(t.view(torch.uint8).numpy()) for n, t in w.items()} for w in (server.live, self._truth))
        return live == true
