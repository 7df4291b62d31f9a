"""Judges answers in processes that can be killed: no reward function stops a run."""

import asyncio
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from configs.data import Reward
from rollout_server.tasks.rewards import RewardError, RewardOutcome, Sample, load_of
from rollout_server.tasks.rewards.process import RewardProcess, WorkerLost
from rollout_server.tasks.workers.frames import pack
from slipstream.runtime.hang import expired

log = logging.getLogger(__name__)
MAX_REQUEST_BYTES = 32 * 1024 * 1024
SLOW_S = 0.02
"""A request that is expected to take longer than this is spread over the workers."""
MAX_SAMPLES = 64
"""Samples in one request of a function that judges one at a time."""
MAX_TRL_SAMPLES = 256
MEAN_DECAY = 0.9
LATE = "timed out after "
"""Begins the error of a call that took longer than reward.timeout_s."""
LATE_IN_A_ROW = 3
"""So many late calls leave a hang report; a single one is named in the log alone."""


@dataclass(slots=True)
class _Request:
    """Samples, each with its outcome, which is cancelled with the call that asked for it."""

    items: list[tuple[Sample, asyncio.Future[RewardOutcome]]]
    stays: bool = False
    """As it is: joined with others, its samples could fail them again."""

    def forget_answered(self) -> None:
        self.items = [item for item in self.items if not item[1].done()]

    def alone(self) -> "list[_Request]":
        return [_Request([item], stays=True) for item in self.items]


class RewardPool:
    """Judges samples in `reward.workers` processes, each request at most reward.timeout_s without progress.

    A group of quick calls is one request to one worker; slow ones are spread over all workers, and asynchronous ones of
    several groups are one request. When a request of several samples times out or kills its worker, those without an
    outcome are judged again one by one, so only the culprit gets an error (of TRL functions, which see all samples of
    a request at once, too).
    """

    def __init__(self, reward: Reward) -> None:
        self._processes = [RewardProcess(reward, f"reward worker {number}") for number in range(reward.num_workers)]
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []
        self._waiting: dict[asyncio.Future[RewardOutcome], float] = {}
        """When each was asked for."""
        self._mean_s: float | None = None
        self._late = 0
        """Calls in a row that were late."""
        self._timeout_s, self._shown = reward.timeout_s, reward.shown

    async def __aenter__(self) -> Self:
        """Start all processes. Raises RewardError: the function cannot be loaded; none is left."""
        results = await asyncio.gather(*(p.ensure() for p in self._processes), return_exceptions=True)
        if failures := [result for result in results if isinstance(result, BaseException)]:
            await self.close()
            raise failures[0]
        self._workers = [asyncio.create_task(self._work(process)) for process in self._processes]
        for worker in self._workers:
            worker.add_done_callback(self._worker_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Outcomes of samples, in their order; a function that fails shows in them.

        Raises RewardError: the pool is not running (not started, closed, or broken).
        """
        if not self._workers or any(worker.done() for worker in self._workers):
            raise RewardError("the reward pool is not running")
        if not samples:
            return []
        loop = asyncio.get_running_loop()
        outcomes: list[asyncio.Future[RewardOutcome]] = [loop.create_future() for _ in samples]
        for start, end in self._parts(len(samples)):
            self._queue.put_nowait(_Request(list(zip(samples[start:end], outcomes[start:end], strict=True))))
        self._waiting |= dict.fromkeys(outcomes, loop.time())
        try:
            return await asyncio.gather(*outcomes)
        finally:
            for outcome in outcomes:
                del self._waiting[outcome]

    def gauges(self) -> dict[str, float]:
        """As `Rewards.gauges`."""
        began = (at for outcome, at in self._waiting.items() if not outcome.done())
        return load_of(began, asyncio.get_running_loop().time(), len(self._processes))

    async def close(self) -> None:
        """Kill the processes; calls that still wait raise RewardError."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self._processes))
        self._workers = []
        self._abandon("the reward pool was closed")

    def _parts(self, num: int) -> Iterator[tuple[int, int]]:
        """Even, contiguous parts of so many samples, one per request to a worker."""
        if self._processes[0].convention == "trl":
            parts = math.ceil(num / MAX_TRL_SAMPLES)
        else:
            parts = math.ceil(num / MAX_SAMPLES)
            if self._mean_s is None or self._mean_s * num > SLOW_S:
                parts = max(parts, min(num, len(self._processes)))
        return itertools.pairwise(num * part // parts for part in range(parts + 1))

    async def _work(self, process: RewardProcess) -> None:
        """Run requests on one process, for as long as the pool is open."""
        while True:
            request = await self._queue.get()
            request.forget_answered()
            if process.judges_at_once:
                self._join_waiting(request)
            if not request.items:
                continue
            frame = pack([sample for sample, _ in request.items])
            if len(frame) <= MAX_REQUEST_BYTES:
                await self._run(process, request, frame)
            elif len(request.items) > 1:
                half = len(request.items) // 2
                for items in (request.items[:half], request.items[half:]):
                    self._queue.put_nowait(_Request(items, stays=True))
            else:
                self._fail(request, f"the sample has {len(frame)} bytes, a reward process takes {MAX_REQUEST_BYTES}")

    def _join_waiting(self, request: _Request) -> None:
        """Add requests that wait, where a function may judge all at once: it mostly waits for a service itself."""
        while not request.stays and len(request.items) < MAX_SAMPLES and not self._queue.empty():
            more = self._queue.get_nowait()
            if more.stays:
                self._queue.put_nowait(more)
                return
            more.forget_answered()
            request.items += more.items

    async def _run(self, process: RewardProcess, request: _Request, frame: bytes) -> None:
        items = request.items
        try:
            await process.ensure()
            await process.judge(len(items), frame, lambda index, outcome: self._record(items[index][1], outcome))
        except RewardError as error:
            self._fail(request, str(error))
        except WorkerLost as lost:
            log.warning("%s: %s; it is started anew", process.name, lost)
            request.forget_answered()
            if len(request.items) == 1:
                self._fail(request, str(lost))
            for alone in request.alone() if len(request.items) > 1 else ():
                self._queue.put_nowait(alone)
            await process.stop()
            try:
                await process.ensure()
            except RewardError as error:
                # The next request tries once more and, if that fails too, gets this reason as its outcome.
                log.warning("%s: does not start: %s", process.name, error)

    def _fail(self, request: _Request, reason: str) -> None:
        for _, outcome in request.items:
            if not outcome.done():
                self._record(outcome, RewardOutcome(score=math.nan, error=reason, seconds=0.0))

    def _record(self, waiting: asyncio.Future[RewardOutcome], outcome: RewardOutcome) -> None:
        mean = outcome.seconds if self._mean_s is None else self._mean_s
        self._mean_s = MEAN_DECAY * mean + (1 - MEAN_DECAY) * outcome.seconds
        self._late = self._late + 1 if (outcome.error or "").startswith(LATE) else 0
        if self._late == LATE_IN_A_ROW:
            what, key = f"reward function {self._shown!r}, {self._late} times in a row", "reward.timeout_s"
            waited_s = self._late * self._timeout_s
            said = expired(what, owed_by=("reward processes",), waited_s=waited_s, key=key, ends=False)
            log.warning("%s was late, the last %s%s [slow]", what, outcome.error, said)
        if not waiting.done():
            waiting.set_result(outcome)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        if not worker.cancelled() and (error := worker.exception()) is not None:
            log.error("reward pool: stopped by %r", error)
            self._abandon(f"the reward pool is broken: {error!r}")

    def _abandon(self, reason: str) -> None:
        for outcome in self._waiting:
            if not outcome.done():
                outcome.set_exception(RewardError(reason))
