"""A learner rank's DEALER as a target."""

import time
from collections.abc import Mapping
from typing import Any

from learner.batches import BatchReader, RunEnded
from replay import messages as m
from replay.channel import ChannelError
from tests.security.fuzz.targets import PATIENCE_S, FakeServer, Vanished, config


class LearnerTarget:
    """Replay sends rubbish to a learner rank."""

    kinds = m.FROM_REPLAY
    accepted = 0

    async def open(self) -> None:
        self._server = FakeServer()
        self._reader = BatchReader(config(), self._server.address, rank=0, fingerprint={})
        self._server.meet(self._reader._dealer.identity, m.Heartbeat())
        await self.drain(1)

    def given(self) -> Mapping[str, Any]:
        return {"rank": 0}

    def send(self, frames: list[bytes]) -> None:
        self._server.send(frames)

    async def drain(self, count: int) -> None:
        """One read each: what every wait of the reader consists of."""
        deadline = time.monotonic() + PATIENCE_S
        for number in range(count):
            heard = self._reader._dealer.last_heard
            while self._reader._dealer.last_heard == heard:
                try:
                    self.accepted += self._reader._next("the next batch") is not None
                except (RunEnded, ChannelError):  # Goodbye and Refused
                    self.accepted += 1
                if time.monotonic() > deadline:
                    raise Vanished(f"{count - number} of {count} messages")
        self._reader.inbox.results.clear()
        self._reader.inbox.closed.clear()

    def close(self) -> None:
        self._reader._dealer.close()
        self._server.close()
