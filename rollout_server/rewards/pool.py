"""The reward pool: judges answers in processes that can be killed, so that no reward function stops a run.

consumes      samples, from any number of concurrent `score` calls
produces      one RewardOutcome per sample, with a score or with the reason why there is none
waits for     reward processes, each request at most reward.timeout_s without progress
unblocked by  their verdicts, their death, or the timeout, after which they are killed and started anew
"""

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from configs.data import Reward
from rollout_server.rewards.base import RewardError, RewardOutcome, Sample
from rollout_server.rewards.framing import MAX_REQUEST_BYTES, pack
from rollout_server.rewards.process import RewardProcess, WorkerLost

log = logging.getLogger(__name__)
WINDOW = 256
"""Calls that `error_rate` looks back on."""
SLOW_S = 0.02
"""A request that is expected to take longer than this is spread over the workers."""
MAX_SAMPLES = 64
"""Samples in one request of a function that judges one at a time."""
MEAN_DECAY = 0.9


class _Call:
    """One `score` call: collects the outcomes of its samples."""

    def __init__(self, num_samples: int) -> None:
        self.outcomes: list[RewardOutcome | None] = [None] * num_samples
        self.missing = num_samples
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def set(self, position: int, outcome: RewardOutcome) -> None:
        self.outcomes[position] = outcome
        self.missing -= 1
        if self.missing == 0 and not self.done.done():
            self.done.set_result(None)


class _Job:
    """Some samples of a call, sent to a worker as one request."""

    def __init__(self, call: _Call, positions: Sequence[int], samples: Sequence[Sample], frame: bytes) -> None:
        self.call = call
        self.positions = positions
        self.samples = samples
        self.frame = frame

    def unanswered(self) -> list[int]:
        """Indices of the samples that have no outcome yet."""
        return [index for index, position in enumerate(self.positions) if self.call.outcomes[position] is None]


class RewardPool:
    """Judges samples in `reward.workers` processes.

    A group of quick calls is one request to one worker; slow ones are spread over all workers. When a request of
    several samples times out or kills its worker, those without an outcome are judged again one by one, so only
    the culprit gets an error. For TRL functions, which see all samples of a request at once, this means that
    samples of a failed request are judged alone.

        async with RewardPool(config.reward) as pool:
            outcomes = await pool.score(samples)
    """

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._processes = [RewardProcess(reward, f"reward worker {number}") for number in range(reward.workers)]
        self._queue: asyncio.Queue[_Job] = asyncio.Queue()
        self._workers: list[asyncio.Task[None]] = []
        self._calls: set[_Call] = set()
        self._failed: deque[bool] = deque(maxlen=WINDOW)
        self._mean_s: float | None = None
        self.last_error: str | None = None
        """The newest error of any call."""
        self.num_calls = 0
        """Samples judged since the start."""
        self.restarts = 0
        """Processes that were killed or died."""

    @property
    def error_rate(self) -> float:
        """Failed calls among the last 256, in [0, 1]. Calls not made yet count as good, so that one early failure
        does not look like a broken function."""
        return sum(self._failed) / WINDOW

    async def start(self) -> None:
        """Start the processes and load the function in each.

        Raises:
            RewardError: the function cannot be loaded; no process is left.
        """
        results = await asyncio.gather(*(p.ensure() for p in self._processes), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await self.close()
            raise failures[0]
        self._workers = [asyncio.create_task(self._work(process)) for process in self._processes]
        for worker in self._workers:
            worker.add_done_callback(self._worker_ended)

    async def score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Judge samples; the outcomes come in their order. A failing function shows in the outcomes, never raises.

        Raises:
            RewardError: the pool is not running (not started, closed, or broken).
        """
        if not self._workers or any(worker.done() for worker in self._workers):
            raise RewardError("the reward pool is not running")
        if not samples:
            return []
        call = _Call(len(samples))
        for positions in self._split(len(samples)):
            self._submit(call, positions, [samples[position] for position in positions])
        self._calls.add(call)
        try:
            await call.done
        finally:
            self._calls.discard(call)
        outcomes = [outcome for outcome in call.outcomes if outcome is not None]
        assert len(outcomes) == len(samples)
        return outcomes

    async def close(self) -> None:
        """Kill the processes; calls that still wait raise RewardError."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        await asyncio.gather(*(process.stop() for process in self._processes))
        self._workers = []
        self._abandon("the reward pool was closed")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _split(self, num_samples: int) -> Iterator[range]:
        """Even, contiguous parts of the samples, one per request."""
        if self._processes[0].convention == "trl":
            parts = math.ceil(num_samples / WINDOW)
        else:
            parts = math.ceil(num_samples / MAX_SAMPLES)
            if self._mean_s is None or self._mean_s * num_samples > SLOW_S:
                parts = max(parts, min(num_samples, len(self._processes)))
        bounds = [num_samples * part // parts for part in range(parts + 1)]
        return (range(start, end) for start, end in itertools.pairwise(bounds))

    def _submit(self, call: _Call, positions: Sequence[int], samples: Sequence[Sample]) -> None:
        frame = pack(samples)
        if len(frame) <= MAX_REQUEST_BYTES:
            self._queue.put_nowait(_Job(call, positions, samples, frame))
        elif len(samples) > 1:
            half = len(samples) // 2
            self._submit(call, positions[:half], samples[:half])
            self._submit(call, positions[half:], samples[half:])
        else:
            reason = f"the sample has {len(frame)} bytes, a reward process takes {MAX_REQUEST_BYTES}"
            self._record(call, positions[0], _failure(reason, 0.0))

    async def _work(self, process: RewardProcess) -> None:
        """Run jobs on one process, for as long as the pool is open."""
        while True:
            job = await self._queue.get()
            if not job.call.done.done():
                await self._run(process, job)

    async def _run(self, process: RewardProcess, job: _Job) -> None:
        try:
            await process.ensure()
            await process.judge(
                len(job.samples),
                job.frame,
                lambda index, outcome: self._record(job.call, job.positions[index], outcome),
            )
        except RewardError as error:
            for index in job.unanswered():
                self._record(job.call, job.positions[index], _failure(str(error), 0.0))
        except WorkerLost as lost:
            log.warning("%s: %s; it is started anew", process.name, lost)
            self._retry(job, lost)
            await self._restart(process)

    def _retry(self, job: _Job, lost: WorkerLost) -> None:
        unanswered = job.unanswered()
        if len(unanswered) == 1:
            self._record(job.call, job.positions[unanswered[0]], _failure(str(lost), lost.seconds))
            return
        for index in unanswered:
            self._submit(job.call, [job.positions[index]], [job.samples[index]])

    async def _restart(self, process: RewardProcess) -> None:
        self.restarts += 1
        await process.stop()
        try:
            await process.ensure()
        except RewardError as error:
            # The next job tries once more and, if that fails too, gets this reason as its outcome.
            log.warning("%s: does not start: %s", process.name, error)

    def _record(self, call: _Call, position: int, outcome: RewardOutcome) -> None:
        self.num_calls += 1
        self._failed.append(outcome.error is not None)
        if outcome.error is not None:
            self.last_error = outcome.error
        mean = outcome.seconds if self._mean_s is None else self._mean_s
        self._mean_s = MEAN_DECAY * mean + (1 - MEAN_DECAY) * outcome.seconds
        call.set(position, outcome)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        if not worker.cancelled() and (error := worker.exception()) is not None:
            log.error("reward pool: stopped by %r", error)
            self._abandon(f"the reward pool is broken: {error!r}")

    def _abandon(self, reason: str) -> None:
        for call in self._calls:
            if not call.done.done():
                call.done.set_exception(RewardError(reason))


def _failure(reason: str, seconds: float) -> RewardOutcome:
    return RewardOutcome(score=math.nan, error=reason, seconds=seconds)
