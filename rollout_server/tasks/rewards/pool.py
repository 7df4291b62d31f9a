"""Judges answers in processes that can be killed: no reward function stops a run.

`reward.workers` processes share the functions of a run. Each model behind an endpoint has one of its own, with the keys
in its environment, where no code of the user is.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

from configs.data import Reward
from configs.rewards import Endpoint, RewardPart
from rollout_server.tasks.rewards import (
    LONGEST_PAUSE_S,
    RewardError,
    RewardOutcome,
    Rewards,
    Sample,
    added,
    load_of,
)
from rollout_server.tasks.rewards.limits import RESOURCES
from rollout_server.tasks.rewards.process import Call, RewardProcess

log = logging.getLogger(__name__)
MAX_AT_ONCE = 64
"""Calls of an asynchronous function of the user in one process."""
MAX_AHEAD = 64
"""Calls that a process has got before it needs them."""
MAX_TRL_SAMPLES = 256


class RewardPool:
    """Judges samples in processes, each call at most reward.timeout_s.

    What waits goes to the process with the least to do. Of calls that were in a process when it was late or has died,
    each is judged again alone, so only the culprit gets an error (of TRL functions, which see a group at once, too).
    """

    def __init__(self, reward: Reward, endpoint: RewardPart | None = None) -> None:
        """Of the functions of a reward, or of one part of it that asks an endpoint."""
        self._at_once, workers, timeout_s = MAX_AT_ONCE, reward.num_workers(), reward.timeout_s
        hidden: frozenset[str] | None = key_variables(reward)
        parts = [part for part in reward.parts if not isinstance(part.settings, Endpoint)]
        limits = {key: getattr(reward, key) for key in RESOURCES}
        if endpoint is not None:
            settings = endpoint.settings
            assert isinstance(settings, Endpoint)
            self._at_once, workers, hidden, parts, limits = settings.concurrency, 1, None, [endpoint], {}
            timeout_s = (settings.retries + 1) * (settings.timeout_s + LONGEST_PAUSE_S)
        self._width = workers if endpoint is None else self._at_once
        is_alone = len(reward.parts) == 1  # then its metrics keep their names
        told = [("" if is_alone else part.label, part.spec, part.weight, part.options) for part in parts]
        order = {"parts": told, "timeout_s": timeout_s, "limits": limits}
        name = "reward worker" if endpoint is None else endpoint.label
        self._processes = [
            RewardProcess(f"{name} {number}", order, hidden, self._record, self._again) for number in range(workers)
        ]
        self._waiting: deque[Call] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._asked: dict[asyncio.Future[RewardOutcome], float] = {}
        """What is owed, and since when."""

    async def __aenter__(self) -> Self:
        """Start all processes. Raises RewardError: the function cannot be loaded; none is left."""
        results = await asyncio.gather(*(process.start() for process in self._processes), return_exceptions=True)
        if failures := [result for result in results if isinstance(result, BaseException)]:
            await self.close()
            raise failures[0]
        self._tasks = [asyncio.create_task(process.run()) for process in self._processes]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Outcomes of samples, in their order; a function that fails shows in them.

        Raises RewardError: the pool is not running (not started, closed, or broken).
        """
        if not self._tasks or any(task.done() for task in self._tasks):
            raise RewardError("the reward pool is not running")
        loop = asyncio.get_running_loop()
        outcomes: list[asyncio.Future[RewardOutcome]] = [loop.create_future() for _ in samples]
        self._asked |= dict.fromkeys(outcomes, loop.time())
        size = MAX_TRL_SAMPLES if self._processes[0].convention == "trl" else 1
        starts = range(0, len(samples), size)
        self._again([Call(list(samples[at : at + size]), outcomes[at : at + size]) for at in starts])
        try:
            return await asyncio.gather(*outcomes)
        finally:
            for outcome in outcomes:
                del self._asked[outcome]

    def gauges(self) -> dict[str, float]:
        """As `Rewards.gauges`; calls of an endpoint at a time stand for workers."""
        began = (at for outcome, at in self._asked.items() if not outcome.done())
        return load_of(began, asyncio.get_running_loop().time(), self._width)

    async def close(self) -> None:
        """Kill the processes; calls that still wait raise RewardError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self._processes))
        self._tasks = []
        self._abandon("the reward pool was closed")

    def _again(self, calls: list[Call]) -> None:
        """Give these, and what waits, to the processes with the least to do."""
        self._waiting += calls
        while self._waiting:
            process, call = min(self._processes, key=lambda one: one.load), self._waiting[0]
            most = min(MAX_AHEAD, math.ceil(len(self._waiting) / (2 * len(self._processes))))
            if call.is_alone or process.convention == "trl":
                most = 1
            elif process.is_async:
                most = self._at_once
            if process.load >= most:
                return
            self._waiting.popleft()
            if not all(outcome.done() for outcome in call.outcomes):
                process.give(call)

    def _record(self, call: Call, outcomes: list[RewardOutcome]) -> None:
        for waiting, outcome in zip(call.outcomes, outcomes, strict=True):
            if not waiting.done():
                waiting.set_result(outcome)
        self._again([])

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("reward pool: stopped by %r", error)
            self._abandon(f"the reward pool is broken: {error!r}")

    def _abandon(self, reason: str) -> None:
        for outcome in self._asked:
            if not outcome.done():
                outcome.set_exception(RewardError(reason))


class _Together:
    """The sum of what several pools say of a sample."""

    def __init__(self, pools: Sequence[RewardPool]) -> None:
        self._pools = pools

    async def score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        columns = await asyncio.gather(*(pool.score(samples) for pool in self._pools))
        return [added(row) for row in zip(*columns, strict=True)]

    def gauges(self) -> dict[str, float]:
        """Of the pool whose oldest answer waits longest."""
        return max((pool.gauges() for pool in self._pools), key=lambda found: found["reward_oldest_s"])


@asynccontextmanager
async def rewards_of(reward: Reward) -> AsyncIterator[Rewards]:
    """What judges by the parts of `reward.function`, until the end of the block.

    Raises RewardError: a function cannot be loaded, or the key of an endpoint is missing.
    """
    endpoints = [part for part in reward.parts if isinstance(part.settings, Endpoint)]
    pools = [RewardPool(reward)] if len(endpoints) < len(reward.parts) else []
    pools += [RewardPool(reward, part) for part in endpoints]
    async with AsyncExitStack() as stack:
        for pool in pools:
            await stack.enter_async_context(pool)
        yield pools[0] if len(pools) == 1 else _Together(pools)


def key_variables(reward: Reward) -> frozenset[str]:
    """Environment variables that hold keys of endpoints, whatever they are called."""
    endpoints = [part.settings for part in reward.parts if isinstance(part.settings, Endpoint)]
    return frozenset(one.key_variable for one in endpoints if one.key_variable)
