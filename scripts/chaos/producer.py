"""A rollout server as it is, with a witness: `python -m scripts.chaos.producer EVENTS --replay tcp://host:port ...`.

EVENTS gets one JSON line for each Ack that came (`ack`), each version that went live (`live`) and each broadcast that
was held (`broadcast`). While EVENTS.hold exists, a broadcast waits in its middle, so that a fault can be aimed at it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from replay import messages as m
from replay.channel import AsyncDealer, Envelope, Message
from rollout_server import main as rollout_main
from weight_bus import subscriber as subscriber_module
from weight_bus.transports import make_transport

HOLD_S = 1.0
"""Longest that a broadcast is held; below weight_bus.collective_timeout_s, so that holding alone breaks nothing."""

events = Path(sys.argv[1])
hold = events.with_suffix(".hold")


def witness(event: str, **fields: Any) -> None:
    """One line, with the kernel before anything follows from it: SIGKILL does not take it back."""
    with events.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"event": event, **fields}) + "\n")


class WitnessedDealer(AsyncDealer):
    """The channel to replay, with what came and went noted down."""

    async def send(self, message: Message) -> None:
        """Note the version that is live when leases are asked for."""
        if isinstance(message, m.LeaseRequest) and message.capacity:
            witness("live", version=message.version)
        await super().send(message)

    async def receive(self, timeout_s: float) -> Envelope | None:
        """Note an Ack before the server acts on it: from here on it may forget the group."""
        envelope = await super().receive(timeout_s)
        if envelope is not None and isinstance(envelope.message, m.Ack):
            ack = envelope.message
            witness("ack", group=[ack.pass_, ack.index], attempt=ack.attempt, status=ack.status)
        return envelope


class HeldTransport:
    """The transport of the weight bus, which waits in the middle of a broadcast while it is told to."""

    def __init__(self, *arguments: Any) -> None:
        self._transport = make_transport(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def broadcast(self, bucket: Any, index: int) -> None:
        """As the transport does, once it is let go."""
        if hold.exists():
            witness("broadcast", bucket=index)
            deadline = time.monotonic() + HOLD_S
            while hold.exists() and time.monotonic() < deadline:
                time.sleep(0.005)
        self._transport.broadcast(bucket, index)


if __name__ == "__main__":
    sys.argv = ["rollout_server", *sys.argv[2:]]
    setattr(rollout_main, "AsyncDealer", WitnessedDealer)  # noqa: B010 (not exported by name)
    setattr(subscriber_module, "make_transport", HeldTransport)  # noqa: B010
    sys.exit(rollout_main.main())
