"""A weight follower of the session's SGLang, for tests with real publishers."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch
from sglang_served import Served, digests, update_of

from configs.infrastructure import WeightBus
from rollout_server.follower import WeightFollower
from weight_bus import Publisher, PublishReport

RUNS = itertools.count()


async def until(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


class Faulty:
    """Of a publisher's transport: `fault` happens to the second bucket, once."""

    fault: Callable[[torch.Tensor], None] | None = None

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        if index == 1 and self.fault is not None:
            fault, self.fault = self.fault, None
            bucket = bucket.clone()
            fault(bucket)
        super().broadcast(bucket, index)  # type: ignore[misc]


class Learner(Publisher):
    """A publisher, and its transport `end`; of a run of its own, or another one of a run."""

    def __init__(self, served: Served, end: type[Any], *overrides: str, run_id: str = "", incarnation: int = 1) -> None:
        self.run_id = run_id or f"run-{next(RUNS)}"  # SGLang keeps the names of its groups
        made: list[Any] = []

        def factory(config: WeightBus, host: str) -> Any:
            made.append(end(config, host))
            return made[0]

        super().__init__(
            served.config(*overrides).weight_bus,
            host="127.0.0.1",
            run_id=self.run_id,
            incarnation=incarnation,
            transport_factory=factory,
        )
        self.end = made[0]

    async def send(self, version: int, model: Any) -> PublishReport:
        """Publish a model."""
        return await asyncio.to_thread(self.publish, version, update_of(model).items(), digests(model))


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
