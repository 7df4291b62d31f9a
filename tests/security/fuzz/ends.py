"""The DEALERs of a rollout server and of a learner rank as targets: replay sends rubbish."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from learner.batches import BatchReader
from learner.dialog import RunEnded as LearnerRunEnded
from replay import messages as m
from replay.channel import AsyncDealer, ChannelError, WireError
from rollout_server.generate import LeaseFailed
from rollout_server.leases import GoodbyeReceived
from rollout_server.server import RolloutServer
from rollout_server.teachers.links import Links
from tests.replay.simulated_run import config
from tests.security.fuzz.targets import PATIENCE_S, DealerTarget, Vanished


async def nothing(*_: Any) -> None: ...


async def refuse(*_: Any) -> None:
    raise LeaseFailed("engine_error", "nothing is generated")


class RolloutTarget(DealerTarget):
    """Its generator gives every lease up, and its follower follows nothing."""

    kinds = m.FROM_REPLAY

    async def open(self) -> None:
        self._dealer = AsyncDealer(self.address, "r0", m.FROM_REPLAY)
        self.meet(self._dealer, m.Heartbeat())
        engine: Any = SimpleNamespace(hold=str, unpin=nothing, health=nothing)
        self._links = Links("rollout-0", None, 2**20)
        listed = SimpleNamespace(listed=lambda told, run_id: self._links.listed(told.entries, run_id), waiting={})
        generator: Any = SimpleNamespace(group=refuse, evaluation=refuse, abort=str, engine=engine, teachers=listed)
        self._reader = RolloutServer(config(), generator, self._dealer, name="rollout-0", fingerprint={})
        self._reader.follower = SimpleNamespace(failure=None, follow=lambda *_: None)  # type: ignore[assignment]
        self._reader.leases.version = 0
        await self.drain(1)

    def given(self) -> Mapping[str, Any]:
        return {"code": "hello"}

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
                with contextlib.suppress(GoodbyeReceived, ChannelError):  # Goodbye and Refused
                    await self._reader.handle(envelope.message, tasks)

    def close(self) -> None:
        self._links.close()
        self._dealer.close()
        super().close()


class LearnerTarget(DealerTarget):
    kinds = m.FROM_REPLAY

    async def open(self) -> None:
        self._reader = BatchReader(config(), self.address, rank=0, fingerprint={})
        self.watch(self._reader._dealer)
        self.meet(self._reader._dealer, m.Heartbeat())
        await self.drain(1)

    def given(self) -> Mapping[str, Any]:
        return {"rank": 0}

    async def drain(self, count: int) -> None:
        """One read each: what every wait of the reader consists of."""
        deadline = time.monotonic() + PATIENCE_S
        for number in range(count):
            before = self.read
            while self.read == before:
                with contextlib.suppress(LearnerRunEnded, ChannelError):  # Goodbye and Refused
                    self._reader._poll(PATIENCE_S)
                if time.monotonic() > deadline:
                    raise Vanished(f"{count - number} of {count} messages")
        self._reader.inbox.results.clear()
        self._reader.inbox.closed.clear()

    def close(self) -> None:
        self._reader._dealer.close()
        super().close()
