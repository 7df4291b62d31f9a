"""A witness inside an unchanged rollout server: one JSON line for everything that its life on the bus turns on.

The servers are started by the documented commands. A `sitecustomize` on their path calls `install` before anything of
theirs runs; it puts watchers around both sockets and around the step that digests what the engine holds.

    join                          it has asked the weight bus for a place
    welcome    version            the publisher's newest version at that moment
    begin      version, digest    a version is about to be sent to it
    proven     version, digest    what the engine holds after loading, digested in place (not yet compared by anybody)
    live       version            it asks replay for leases
    dark                          it asks for none any more: quarantined
    lease      group, attempt     a prompt came
    ack        group, attempt, status   replay keeps a group (scripts/chaos/checker.py reads these)

`at` is the machine's monotonic clock, the same for all processes. A gate (scripts/bus_faults/gates.py) can hold the
server before its Join, or in the middle of a broadcast.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SITE = '''"""Python runs this at the start of every process: rollout servers get a witness."""
import sys

if "rollout_server.main" in sys.orig_argv:
    from pathlib import Path

    from scripts.elastic.witness import install

    names = [word for before, word in zip(sys.orig_argv, sys.orig_argv[1:]) if before == "--server-name"]
    install(Path({folder!r}), names[-1])
'''


def diary_of(folder: Path, name: str) -> Path:
    """Where the witness of a rollout server writes."""
    return folder / f"{name}.jsonl"


def gate_of(folder: Path, name: str) -> Path:
    """The gate of a rollout server."""
    return folder / f"{name}.gate"


def install(folder: Path, name: str) -> None:
    """Watch the rollout server that this process becomes."""
    from scripts.bus_faults import gates

    path = diary_of(folder, name)

    def note(event: str, **fields: Any) -> None:
        # with the kernel before anything follows from it: SIGKILL does not take it back
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")

    gates.install(gates.Gate(gate_of(folder, name)))
    _watch_bus(note)
    _watch_replay(note)


def _watch_bus(note: Any) -> None:
    from weight_bus import intake, messages, subscriber
    from weight_bus.digest import combined

    class Dealer(subscriber.Subscriber.__init__.__kwdefaults__["dealer"]):  # type: ignore[misc]  # the gated one
        """The control plane of the bus."""

        def send(self, message: Any) -> bool:
            """See `Dealer.send`."""
            sent: bool = super().send(message)
            if isinstance(message, messages.Join):
                note("join")
            return sent

        def poll(self, timeout_s: float) -> Any:
            """See `Dealer.poll`."""
            message = super().poll(timeout_s)
            if isinstance(message, messages.Welcome):
                note("welcome", version=message.version)
            elif isinstance(message, messages.Begin):
                note("begin", version=message.version, digest=message.digest)
            return message

    class Intake(subscriber.Intake):  # type: ignore[misc,name-defined]
        """What applies a staged version."""

        def apply(self, version: int, load: intake.Load) -> Mapping[str, int]:
            """See `Intake.apply`."""
            held: Mapping[str, int] = super().apply(version, load)
            note("proven", version=version, digest=combined(held))
            return held

    subscriber.Subscriber.__init__.__kwdefaults__["dealer"] = Dealer
    setattr(subscriber, "Intake", Intake)  # noqa: B010 (not exported by name)


def _watch_replay(note: Any) -> None:
    from replay import channel
    from replay import messages as m

    class AsyncDealer(channel.AsyncDealer):
        """The channel to replay."""

        async def send(self, message: channel.Message) -> None:
            """See `AsyncDealer.send`."""
            if isinstance(message, m.LeaseRequest):
                if message.capacity:
                    note("live", version=message.version)
                else:
                    note("dark")
            await super().send(message)

        async def receive(self, timeout_s: float) -> channel.Envelope | None:
            """Note what came before the server acts on it."""
            envelope = await super().receive(timeout_s)
            message = envelope.message if envelope is not None else None
            if isinstance(message, m.Lease):
                note("lease", group=[message.pass_, message.index], attempt=message.attempt)
            elif isinstance(message, m.Ack):
                what = [message.pass_, message.index]
                note("ack", group=what, attempt=message.attempt, status=message.status)
            return envelope

    setattr(channel, "AsyncDealer", AsyncDealer)  # noqa: B010
