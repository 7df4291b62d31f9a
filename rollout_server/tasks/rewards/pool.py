"""Judges answers in processes that can be killed: no reward function stops a run."""

import asyncio
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from configs.data import Reward
from rollout_server.tasks.rewards import RewardError, RewardOutcome, Sample, load_of
from rollout_server.tasks.rewards.process import RewardProcess, WorkerLost
from rollout_server.tasks.rewards.protocol import MAX_REQUEST_BYTES
from rollout_server.tasks.workers.frames import pack
from slipstream.runtime.hang import expired

log = logging.getLogger(__name__)
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


@dataclass(frozen=True, slots=True)
class _Item:
    """A sample of a call. Its outcome is cancelled with the call."""

    sample: Sample
    outcome: asyncio.Future[RewardOutcome]
    stays: bool = False
    """In the request that it is in: joined with others it could fail them again."""


class RewardPool:
    """Judges samples in `reward.workers` processes, each request at most reward.timeout_s without progress.

    A group of quick calls is one request to one worker; slow ones are spread over all workers, and asynchronous ones of
    several groups are one request. When a request of
    several samples times out or kills its worker, those without an outcome are judged again one by one, so only
    the culprit gets an error. For TRL functions, which see all samples of a request at once, this means that
    samples of a failed request are judged alone.
    """

    def __init__(self, reward: Reward) -> None:
        self._processes = [RewardProcess(reward, f"reward worker {number}") for number in range(reward.num_workers)]
        self._queue: asyncio.Queue[list[_Item]] = asyncio.Queue()
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
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
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
        items = [_Item(sample, loop.create_future()) for sample in samples]
        for part in self._split(items):
            self._queue.put_nowait(part)
        outcomes = [item.outcome for item in items]
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

    def _split(self, items: list[_Item]) -> Iterator[list[_Item]]:
        """Even, contiguous parts, one per request to a worker."""
        if self._processes[0].convention == "trl":
            parts = math.ceil(len(items) / MAX_TRL_SAMPLES)
        else:
            parts = math.ceil(len(items) / MAX_SAMPLES)
            if self._mean_s is None or self._mean_s * len(items) > SLOW_S:
                parts = max(parts, min(len(items), len(self._processes)))
        bounds = [len(items) * part // parts for part in range(parts + 1)]
        return (items[start:end] for start, end in itertools.pairwise(bounds))

    async def _work(self, process: RewardProcess) -> None:
        """Run requests on one process, for as long as the pool is open."""
        while True:
            items = _unanswered(await self._queue.get())
            if not items:
                continue
            self._join_waiting(process, items)
            frame = pack([item.sample for item in items])
            if len(frame) <= MAX_REQUEST_BYTES:
                await self._run(process, items, frame)
            elif len(items) > 1:
                half = len(items) // 2
                for part in (items[:half], items[half:]):
                    self._queue.put_nowait([replace(item, stays=True) for item in part])
            else:
                self._fail(items, f"the sample has {len(frame)} bytes, a reward process takes {MAX_REQUEST_BYTES}")

    def _join_waiting(self, process: RewardProcess, items: list[_Item]) -> None:
        """Add requests that wait, where a function may judge all at once: it mostly waits for a service itself."""
        if not process.judges_at_once or items[0].stays:
            return
        while len(items) < MAX_SAMPLES and not self._queue.empty():
            more = self._queue.get_nowait()
            if more[0].stays:
                self._queue.put_nowait(more)
                return
            items += _unanswered(more)

    async def _run(self, process: RewardProcess, items: list[_Item], frame: bytes) -> None:
        try:
            await process.ensure()
            await process.judge(len(items), frame, lambda index, outcome: self._record(items[index], outcome))
        except RewardError as error:
            self._fail(items, str(error))
        except WorkerLost as lost:
            log.warning("%s: %s; it is started anew", process.name, lost)
            unanswered = _unanswered(items)
            if len(unanswered) == 1:
                self._fail(unanswered, str(lost))
            else:
                for item in unanswered:
                    self._queue.put_nowait([replace(item, stays=True)])
            await self._restart(process)

    async def _restart(self, process: RewardProcess) -> None:
        await process.stop()
        try:
            await process.ensure()
        except RewardError as error:
            # The next job tries once more and, if that fails too, gets this reason as its outcome.
            log.warning("%s: does not start: %s", process.name, error)

    def _fail(self, items: list[_Item], reason: str) -> None:
        for item in _unanswered(items):
            self._record(item, RewardOutcome(score=math.nan, error=reason, seconds=0.0))

    def _record(self, item: _Item, outcome: RewardOutcome) -> None:
        mean = outcome.seconds if self._mean_s is None else self._mean_s
        self._mean_s = MEAN_DECAY * mean + (1 - MEAN_DECAY) * outcome.seconds
        self._late = self._late + 1 if (outcome.error or "").startswith(LATE) else 0
        if self._late == LATE_IN_A_ROW:
            what, key = f"reward function {self._shown!r}, {self._late} times in a row", "reward.timeout_s"
            waited_s = self._late * self._timeout_s
            said = expired(what, owed_by=("reward processes",), waited_s=waited_s, key=key, ends=False)
            log.warning("%s was late, the last %s%s [slow]", what, outcome.error, said)
        if not item.outcome.done():
            item.outcome.set_result(outcome)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        if not worker.cancelled() and (error := worker.exception()) is not None:
            log.error("reward pool: stopped by %r", error)
            self._abandon(f"the reward pool is broken: {error!r}")

    def _abandon(self, reason: str) -> None:
        for outcome in self._waiting:
            if not outcome.done():
                outcome.set_exception(RewardError(reason))


def _unanswered(items: list[_Item]) -> list[_Item]:
    """Those whose outcome is still waited for."""
    return [item for item in items if not item.outcome.done()]
