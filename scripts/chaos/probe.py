"""A rollout server or learner rank 0 as it is, with a probe: `python -m scripts.chaos.probe MODULE ARGUMENTS`.

It records a JSON line for each event below, and has a gate at which the harness holds the process. CHAOS_PROBES names
the folder of all probes. Subclasses are handed to the product's own entry points; nothing of the product is replaced.

    join                                a place on the weight bus was asked for
    welcome    version                  the publisher's newest version at that moment
    begin      version                  a version is about to be sent
    proven     version, digest          what the engine holds after loading, digested in place, not yet compared
    live       version                  leases are asked for
    dark       version                  none are asked for any more: quarantined
    lease      group, attempt           a prompt came
    ack        group, attempt, status   replay keeps a group, or does not

`at` is the machine's monotonic clock, the same for all processes.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from configs.infrastructure import WeightBus
from replay import messages as m
from replay.channel import AsyncDealer, Dealer, Envelope, Message
from scripts.chaos.watch import SPOIL, Gate
from weight_bus import Subscriber, messages
from weight_bus.digest import combined
from weight_bus.intake import Load
from weight_bus.manifest import Layout
from weight_bus.transports import Formation, Transport, TransportFactory, make_transport
from weight_bus.transports.base import ignore
from weight_bus.transports.gloo import GlooCollective
from weight_bus.transports.meeting import HERE, Meeting


class Recorder(Gate):
    """The process's end of a probe."""

    def note(self, event: str, **fields: Any) -> None:
        """One line, with the kernel before anything follows from it: SIGKILL does not take it back."""
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")


def replay_dealer(recorder: Recorder) -> type[AsyncDealer]:
    class RecordedDealer(AsyncDealer):
        async def send(self, message: Message) -> None:
            if isinstance(message, m.LeaseRequest):
                recorder.note("live" if message.capacity else "dark", version=message.version)
            await super().send(message)

        async def receive(self, timeout_s: float) -> Envelope | None:
            """Record a message before the server acts on it: after an Ack it may forget the group."""
            envelope = await super().receive(timeout_s)
            message = envelope.message if envelope is not None else None
            if isinstance(message, m.Lease | m.Ack):
                status = {"status": message.status} if isinstance(message, m.Ack) else {}
                group, kind = [message.pass_, message.index], type(message).__name__.lower()
                recorder.note(kind, group=group, attempt=message.attempt, **status)
            return envelope

    return RecordedDealer


def bus_subscriber(recorder: Recorder) -> type[Subscriber]:
    """The rollout server's end of the weight bus, recorded and gated."""

    class GatedDealer(Dealer):
        """Behind each message, sent or come, there is a moment of its name; and one before it is sent."""

        def send(self, message: Message) -> None:
            kind = type(message).__name__
            recorder.reach(f"before {kind}")
            super().send(message)
            if kind == "Join":
                recorder.note("join")
            recorder.reach(kind)

        def poll(self, timeout_s: float) -> Envelope | None:
            envelope = super().poll(timeout_s)
            message = envelope.message if envelope is not None else None
            if isinstance(message, messages.Welcome | messages.Begin):
                recorder.note(type(message).__name__.lower(), version=message.version)
            recorder.reach(type(message).__name__)
            return envelope

    class GatedSubscriber(Subscriber):
        def __init__(self, address: str, **options: Any) -> None:
            super().__init__(address, **{"dealer": GatedDealer, "transport_factory": gated(recorder), **options})

        def receive(self, load: Load, **callbacks: Any) -> int:
            def loaded(version: int, named: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
                held = load(version, applied(list(named), recorder))
                recorder.note("proven", version=version, digest=combined(held))
                recorder.reach("proving")
                return held

            return super().receive(loaded, **callbacks)

    return GatedSubscriber


def applied(named: Sequence[tuple[str, torch.Tensor]], gate: Gate) -> Iterator[tuple[str, torch.Tensor]]:
    for number, pair in enumerate(named):
        if number == len(named) // 2:
            gate.reach("applying")
        yield pair


def gated(gate: Gate) -> TransportFactory:
    def make(config: WeightBus, host: str) -> Transport:
        inner = make_transport(config, host)
        if type(inner) is GlooCollective:
            inner = GlooCollective(
                config, host, GatedMeeting(host, timedelta(seconds=config.collective_timeout_s), gate)
            )
        return GatedTransport(inner, gate)

    return make


class GatedTransport:
    """A transport with a gate around three of its buckets, and before they are digested."""

    def __init__(self, inner: Transport, gate: Gate) -> None:
        self._inner, self._gate, self._buckets = inner, gate, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def label(self, version: int, layout: Layout | None) -> None:
        self._buckets = len(layout.bucket_sizes) if layout is not None else 1  # a change is one
        self._inner.label(version, layout)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        moments = {0: "first bucket", self._buckets - 1: "last bucket", self._buckets // 2: "middle bucket"}
        self._gate.reach(moments.get(index, ""))
        self._inner.broadcast(bucket, index)
        if moments.get(index) == "middle bucket" and self._gate.reach(SPOIL):
            bucket[0] ^= 1

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        self._inner.finish(arrived)
        self._gate.reach("verifying")


class GatedMeeting(Meeting):
    """Where the members of a group meet: the gate is behind one's own address, before connecting to the others."""

    def __init__(self, host: str, timeout: timedelta, gate: Gate) -> None:
        super().__init__(host, timeout)
        self._gate = gate

    def at(self, formation: Formation) -> Any:
        self._gated = GatedStore(super().at(formation), self._gate)  # kept: the group keeps only its C++ half
        return self._gated


class GatedStore(Store):
    """A store that reaches the gate once the member's address is known to the others."""

    def __init__(self, inner: Store, gate: Gate) -> None:
        super().__init__()
        self._inner, self._gate = inner, gate

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)
        if not key.startswith(HERE):
            self._gate.reach("forming")

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def wait(self, *arguments: Any) -> None:
        self._inner.wait(*arguments)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def add(self, key: str, number: int) -> int:
        return self._inner.add(key, number)

    def has_extended_api(self) -> bool:
        return False  # then only the methods above are called


def main() -> int:
    module, folder = sys.argv[1], Path(os.environ["CHAOS_PROBES"])
    sys.argv = sys.argv[1:]
    if module == "learner.train":
        from learner import train

        gate = Gate(folder / "learner")

        class GatedLearner(train.Learner):
            """While rank 0 is held here, the other ranks wait for it in the gather."""

            def publish(self, version: int) -> None:
                gate.reach("gathering")
                super().publish(version)

        train.main(GatedLearner)
    from rollout_server import main as server

    name = [after for word, after in zip(sys.argv, sys.argv[1:], strict=False) if word == "--server-name"]
    recorder = Recorder(folder / name[-1])
    parts = server.Parts(dealer=replay_dealer(recorder), subscriber=bus_subscriber(recorder))
    return server.main(parts=parts)


if __name__ == "__main__":
    sys.exit(main())
