"""A weight follower of the session's SGLang, for tests with real publishers."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sglang_served import Served

from rollout_server.follower import WeightFollower
from weight_bus import Publisher


async def until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


class Follower(WeightFollower):
    """Keeps what it said."""

    def __init__(self, served: Served, *overrides: str) -> None:
        self.live: list[int] = []
        self.dark: list[str] = []
        super().__init__(
            served.config(*overrides), served.engine, "one", on_live=self._went_live, on_quarantine=self._went_dark
        )

    async def join(self, publisher: Publisher, run_id: str) -> None:
        """Follow this one from now on."""
        self.follow(publisher.address, run_id)
        await until(lambda: publisher.members() or self.failure, "it joins")
        assert self.failure is None, self.failure

    async def _went_live(self, version: int, incarnation: int) -> None:
        self.live.append(version)

    async def _went_dark(self, reason: str) -> None:
        self.dark.append(reason)


@asynccontextmanager
async def following(served: Served, publisher: Publisher, run_id: str, *overrides: str) -> AsyncIterator[Follower]:
    follower = Follower(served, *overrides)
    try:
        await follower.join(publisher, run_id)
        yield follower
    finally:
        await asyncio.to_thread(follower.stop)
