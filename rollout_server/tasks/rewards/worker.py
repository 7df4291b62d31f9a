"""The work of a reward process (workers/worker.py): judges samples by all parts of the reward.

| from   | message                                                                                     |
|--------|---------------------------------------------------------------------------------------------|
| pool   | first: {"parts": [part, ...], "timeout_s": float, "limits": {key: int}}                     |
| pool   | then calls: [number, [sample, ...]]                                                         |
| worker | first: {"convention": str, "is_async": bool} or {"error": str}                              |
| worker | for each call: [number, [[score, metrics, error, seconds], ...]]                            |

A part is [label, spec, weight, options]. The reward is the weighted sum of the scores; a part without a score fails its
sample, because a sum of what is left would be another reward. Code of the user runs here and may hang, crash or print:
the pool kills this process when it takes too long, and limits (rewards/limits.py) hold what it takes.
"""

import asyncio
import contextlib
import math
import numbers
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from configs.errors import SlipstreamError, kind_of
from rollout_server.tasks.rewards import NotScored, RewardError, RewardOutcome, Sample, added
from rollout_server.tasks.rewards.limits import confine, exceeded, leave
from rollout_server.tasks.rewards.loading import RewardFunction, load_function
from rollout_server.tasks.workers.frames import MAX_ERROR_CHARS, MAX_METRICS, pack, read, receive, sendable
from slipstream.runtime.loading import describe

Verdict = tuple[float | None, dict[str, float], str | None, float]
"""(score or None, metrics, error or None, seconds)."""
NOT_APPLICABLE = "not_applicable"


class NotAReward(SlipstreamError, ValueError, code="SLIP-REWARD-02"):
    """The function returned something that is no reward."""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One function of a reward. One without a label stands alone: its metrics have no prefix."""

    label: str
    weight: float
    function: RewardFunction

    async def outcomes(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """What it adds to each sample: one call for all (TRL), or one for each."""
        if self.function.convention == "trl":
            return await self._called(samples, len(samples))
        return [(await self._called(sample, None))[0] for sample in samples]

    async def _called(self, argument: Any, num: int | None) -> list[RewardOutcome]:
        start = time.perf_counter()
        try:
            value = self.function.call(argument)
            value = await value if self.function.is_async else value
            values = [value] if num is None else listed(value, num)
        except BaseException as error:
            if self.function.is_async and isinstance(error, asyncio.CancelledError):
                raise  # a cancelled call is the timeout of all samples
            failed = RewardOutcome(score=math.nan, error=self._said(error), seconds=time.perf_counter() - start)
            return [failed] * (num or 1)
        seconds = (time.perf_counter() - start) / len(values)
        return [self._outcome(value, seconds) for value in values]

    def _outcome(self, value: Any, seconds: float) -> RewardOutcome:
        try:
            score, metrics = reward_of(value)
        except NotAReward as problem:
            return RewardOutcome(score=math.nan, error=self._said(problem), seconds=seconds)
        except BaseException as problem:  # noqa: BLE001 - reading an object of the user runs code of the user
            said = f"what the reward function returned cannot be read: {self._said(problem)}"
            return RewardOutcome(score=math.nan, error=said, seconds=seconds)
        if self.label:
            named = {f"{self.label}/{name}": item for name, item in metrics.items()}
            metrics = {self.label: score, f"{self.label}/seconds": seconds} | named
        return RewardOutcome(score=self.weight * score, metrics=metrics, seconds=seconds)

    def _said(self, error: BaseException) -> str:
        if isinstance(error, NotAReward):
            return f"the reward function {f'{self.label} {error}'.strip()}"
        if isinstance(error, NotScored):
            return f"{self.label}: {error}".removeprefix(": ")
        limit = exceeded(error)  # may end this process, so it comes first
        return describe(error) + limit


class CompositeReward:
    """All parts of a reward as one."""

    def __init__(self, parts: Sequence[WeightedReward], timeout_s: float = math.inf) -> None:
        """`timeout_s` bounds asynchronous calls, after which the process lives on; the pool kills it for others."""
        self._parts, self._timeout_s = parts, timeout_s
        self.is_async = any(part.function.is_async for part in parts)
        conventions = {part.function.convention for part in parts}
        self.convention = "trl" if "trl" in conventions else "verl" if conventions == {"verl"} else "sample"

    async def judge(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Of the samples of one call."""
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s) if self.is_async else contextlib.nullcontext():
                columns = [await part.outcomes(samples) for part in self._parts]
        except TimeoutError:
            late = RewardOutcome(
                score=math.nan, error=f"timed out after {self._timeout_s:g} s", seconds=time.perf_counter() - start
            )
            columns = [[late] * len(samples)]
        return [_verdict(added(row)) for row in zip(*columns, strict=True)]

    def judge_now(self, samples: Sequence[Sample]) -> list[Verdict]:
        """The same without an event loop, where no part is asynchronous: functions may start one of their own."""
        try:
            self.judge(samples).send(None)
        except StopIteration as ended:
            verdicts: list[Verdict] = ended.value
            return verdicts
        raise AssertionError("a part without `async` has waited")

    async def serve(self, channel: socket.socket) -> None:
        """Judge calls side by side, on one loop, so that functions may keep their connections."""
        reader, writer = await asyncio.open_unix_connection(sock=channel)

        async def one(number: int, samples: list[Sample]) -> None:
            writer.write(pack([number, await self.judge(samples)]))

        running = set()  # the loop itself holds no task
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                running.add(task := asyncio.create_task(one(*await receive(reader, 2**32, {}))))
                task.add_done_callback(running.discard)


def load(order: dict[str, Any]) -> CompositeReward:
    """What judges by all parts. Raises RewardError: one cannot be loaded."""
    parts = [
        WeightedReward(label, weight, load_function(spec, options)) for label, spec, weight, options in order["parts"]
    ]
    return CompositeReward(parts, order["timeout_s"])


def work(channel: socket.socket) -> int:
    """Set the order's limits and judge until the pool closes the channel; the exit code."""
    requests = channel.makefile("rb")
    if (order := read(requests)) is None:
        return 0
    confine(order["limits"])
    try:
        try:
            judge = load(order)
        except RewardError as error:
            reason = str(error) + exceeded(error)
            channel.sendall(pack({"error": sendable(reason[:MAX_ERROR_CHARS])}))
            return 1
        channel.sendall(pack({"convention": judge.convention, "is_async": judge.is_async}))
        if judge.is_async:
            # Its loop ends with this process, without being closed: past a memory limit, tasks of the user must not
            # hold up the end.
            asyncio.Runner().run(judge.serve(channel))
            return 0
        while (call := read(requests)) is not None:
            number, samples = call
            channel.sendall(pack([number, judge.judge_now(samples)]))
        return 0
    except MemoryError:
        leave("memory_bytes")


def _verdict(outcome: RewardOutcome) -> Verdict:
    if outcome.error is not None:
        return None, {}, sendable(outcome.error[:MAX_ERROR_CHARS]), outcome.seconds
    return outcome.score, outcome.metrics, None, outcome.seconds


def listed(values: Any, num: int) -> list[Any]:
    """One value for each of `num` samples, from what a TRL function returned. Raises NotAReward.

    None says that the function does not apply to a sample. TRL then has the reward 0 where no other function applies,
    and so it is here; NOT_APPLICABLE is the share of such samples.
    """
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != num:
        found = f"{len(values)} of them" if isinstance(values, (list, tuple)) else kind_of(values)
        raise NotAReward(f"must return a list of {num} numbers, found {found}")
    if any(value is None for value in values):
        return [{"score": 0.0 if v is None else v, NOT_APPLICABLE: float(v is None)} for v in values]
    return list(values)


def reward_of(value: Any) -> tuple[float, dict[str, float]]:
    """Score and metrics of a returned number or dict. Raises NotAReward: no finite number where one is needed."""
    if not isinstance(value, dict):
        return _number(value, "returned"), {}
    key = next((key for key in ("score", "reward") if key in value), None)
    if key is None:
        raise NotAReward(f"returned a dict without 'score' or 'reward' (keys {sorted(map(str, value))[:8]})")
    score = _number(value[key], f"returned {key} =")
    metrics = {
        sendable(str(name)[:100]): _number(item, f"returned {name} =")
        for name, item in value.items()
        if name != key and _scalar(item) is not None
    }
    if len(metrics) > MAX_METRICS:
        raise NotAReward(f"returned {len(metrics)} metrics, at most {MAX_METRICS} are kept")
    return score, metrics


def _scalar(value: Any) -> float | None:
    """The value as a float; numpy and torch scalars count, lists and text do not."""
    if not isinstance(value, numbers.Real) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):
            return None  # more than one element
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return math.inf


def _number(value: Any, what: str) -> float:
    number = _scalar(value)
    if number is None:
        shown = "None" if value is None else f"{str(value)[:60]!r}, {kind_of(value)}"
        raise NotAReward(f"{what} {shown}; it must be a finite number, or a dict with one under 'score'")
    if not math.isfinite(number):
        raise NotAReward(f"{what} {number}")
    return number
