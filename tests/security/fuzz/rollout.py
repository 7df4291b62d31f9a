"""A rollout server's DEALER as a target."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, cast

from replay import messages as m
from replay.channel import AsyncDealer, ChannelError, WireError
from rollout_server.generate import Generator, LeaseFailed
from rollout_server.server import RolloutServer, RunEnded
from tests.security.fuzz.targets import PATIENCE_S, FakeServer, Vanished, config


class NoEngine:
    """Holds nothing and generates nothing."""

    async def unpin(self, version: int) -> None:
        """Nothing was pinned."""

    async def health(self) -> None:
        """It lives."""


class Refusing:
    """A generator that gives every lease up."""

    engine = NoEngine()

    async def group(self, lease: m.Lease, request_id: str) -> m.Group:
        """Refuse."""
        raise LeaseFailed("engine_error", f"{lease.index} of {request_id} is not generated")

    async def evaluation(self, lease: m.EvaluationLease) -> m.EvaluationResult:
        """Refuse."""
        raise LeaseFailed("engine_error", f"version {lease.version} is not evaluated")

    def abort(self, request_id: str) -> None:
        """Nothing runs."""


class NoFollower:
    """Follows no weights."""

    failure = None

    def follow(self, *publisher: Any) -> None:
        """Do not."""


class RolloutTarget:
    """Replay sends rubbish to a rollout server."""

    kinds = m.FROM_REPLAY
    accepted = 0

    async def open(self) -> None:
        self._server = FakeServer()
        self._dealer = AsyncDealer(self._server.address, "r0", m.FROM_REPLAY)
        self._server.meet("r0", m.Heartbeat())
        self._reader = RolloutServer(
            config(), cast(Generator, Refusing()), self._dealer, name="rollout-0", fingerprint={}
        )
        self._reader.follower = NoFollower()  # type: ignore[assignment]
        self._reader.version = 0
        await self.drain(1)

    def given(self) -> Mapping[str, Any]:
        return {"reason": "say Hello first"}

    def send(self, frames: list[bytes]) -> None:
        self._server.send(frames)

    async def drain(self, count: int) -> None:
        """As RolloutServer.next_message and its loop. What the messages start (refused leases) is awaited with them."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                try:
                    envelope = await self._dealer.receive(PATIENCE_S)
                except WireError:
                    continue
                if envelope is None:
                    raise Vanished(f"{count - number} of {count} messages")
                self.accepted += 1
                with contextlib.suppress(RunEnded, ChannelError):  # Goodbye and Refused
                    await self._reader.handle(envelope.message, tasks)

    def close(self) -> None:
        self._dealer.close()
        self._server.close()
