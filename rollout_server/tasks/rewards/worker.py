"""The work of a reward process (workers/worker.py): judges samples by all parts of the reward.

| from   | message                                                                                     |
|--------|---------------------------------------------------------------------------------------------|
| pool   | first: {"parts": [part, ...], "timeout_s": float, "limits": {key: int}}, then [sample, ...] |
| worker | first: {"convention": str, "is_async": bool} or {"error": str}                              |
| worker | per request, until every sample has one: [[index, score, metrics, error, seconds], ...]     |

A part is [label, spec, weight, options]. The reward is the weighted sum of the scores; a part without a score fails its
sample, because a sum of what is left would be another reward. Code of the user runs here and may hang, crash or print:
the pool kills this process when it takes too long, and limits (rewards/limits.py) hold what it takes.
"""

import contextlib
import math
import numbers
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from configs.errors import SlipstreamError, kind_of
from rollout_server.tasks.rewards import RewardError, Sample
from rollout_server.tasks.rewards.limits import confine, exceeded, leave
from rollout_server.tasks.rewards.loading import RewardFunction, load_function
from rollout_server.tasks.workers.frames import MAX_ERROR_CHARS, MAX_METRICS, pack, read, sendable
from slipstream.runtime.loading import describe

Order = Sequence[tuple[str, str, float, dict[str, Any]]]
"""(label, spec, weight, options) of each part. One without a label stands alone: its metrics have no prefix."""
Verdict = tuple[int, float | None, dict[str, float], str | None, float]
"""(index in the request, score or None, metrics, error or None, seconds)."""
Worth = tuple[float, dict[str, float]] | str
"""What a part adds to the sum and to the metrics of a sample, or why it adds nothing."""
NOT_APPLICABLE = "not_applicable"
FLUSH_S = 0.02
"""Verdicts younger than this are sent together; a pool that kills the worker judges them anew."""


class NotAReward(SlipstreamError, ValueError, code="SLIP-REWARD-02"):
    """The function returned something that is no reward."""


@dataclass(frozen=True, slots=True)
class Part:
    """One function of a reward."""

    label: str
    weight: float
    function: RewardFunction

    async def column(self, samples: Sequence[Sample]) -> list[Worth]:
        """What it adds to each sample: one call for all (TRL), or one for each."""
        if self.function.convention != "trl":
            return [await self._alone(sample) for sample in samples]
        start = time.perf_counter()
        try:
            values = listed(await self._called(samples), len(samples))
        except NotAReward as problem:
            return [self._said(problem)] * len(samples)
        seconds = (time.perf_counter() - start) / len(samples)
        return [self._worth(value, seconds) for value in values]

    async def _alone(self, sample: Sample) -> Worth:
        start = time.perf_counter()
        try:
            value = await self._called(sample)
        except BaseException as error:
            if self.function.is_async and not isinstance(error, Exception):
                raise  # a cancelled call is the timeout of all samples
            return explained(error)
        return self._worth(value, time.perf_counter() - start)

    async def _called(self, argument: Any) -> Any:
        value = self.function.call(argument)
        return await value if self.function.is_async else value

    def _worth(self, value: Any, seconds: float) -> Worth:
        try:
            score, metrics = reward_of(value)
        except NotAReward as problem:
            return self._said(problem)
        except BaseException as problem:  # noqa: BLE001 - reading an object of the user runs code of the user
            return f"what the reward function returned cannot be read: {explained(problem)}"
        if self.label:
            named = {f"{self.label}/{name}": item for name, item in metrics.items()}
            metrics = {self.label: score, f"{self.label}/seconds": seconds} | named
        return self.weight * score, metrics

    def _said(self, problem: NotAReward) -> str:
        return f"the reward function {f'{self.label} {problem}'.strip()}"


class Judge:
    """All parts of a reward as one."""

    def __init__(self, parts: Sequence[Part], timeout_s: float = math.inf) -> None:
        """`timeout_s` bounds asynchronous calls, after which the process lives on; the pool kills it for others."""
        self._parts, self._timeout_s = parts, timeout_s
        self.is_async = any(part.function.is_async for part in parts)
        conventions = {part.function.convention for part in parts}
        self.convention = "trl" if "trl" in conventions else "verl" if conventions == {"verl"} else "sample"
        if self.is_async:
            import asyncio  # takes 40 ms, which synchronous functions do not need

            # One loop over all requests, so that the function may keep its connections. It ends with this process,
            # without being closed: past a memory limit, tasks of the user must not hold up the end.
            self._runner, self._gather, self._timeout = asyncio.Runner(), asyncio.gather, asyncio.timeout

    def judge(self, samples: Sequence[Sample], send: Callable[[list[Verdict]], None]) -> None:
        """Send every sample's verdict once: asynchronous ones when they come, others together."""
        indices = list(range(len(samples)))
        asked = [indices] if self.convention == "trl" else [[number] for number in indices]
        if self.is_async:
            self._runner.run(self._at_once(samples, asked, send))
            return
        pending: list[Verdict] = []
        flushed = time.perf_counter()
        for group in asked:
            pending += _without_waiting(self._verdicts(samples, group))
            if (now := time.perf_counter()) - flushed > FLUSH_S:
                send(pending)
                pending, flushed = [], now
        if pending:
            send(pending)

    async def _at_once(
        self, samples: Sequence[Sample], asked: Sequence[list[int]], send: Callable[[list[Verdict]], None]
    ) -> None:
        async def one(group: list[int]) -> None:
            send(await self._verdicts(samples, group))

        await self._gather(*map(one, asked))

    async def _verdicts(self, samples: Sequence[Sample], group: Sequence[int]) -> list[Verdict]:
        """Of the samples with these indices, which one call of a TRL function judges."""
        start = time.perf_counter()
        chosen = [samples[index] for index in group]
        worths: list[Worth]
        limit: Any = self._timeout(self._timeout_s) if self.is_async else contextlib.nullcontext()
        try:
            async with limit:
                columns = [await part.column(chosen) for part in self._parts]
                worths = [_sum(row) for row in zip(*columns, strict=True)]
        except TimeoutError as error:
            late = self.is_async and limit.expired()
            worths = [f"timed out after {self._timeout_s:g} s" if late else explained(error)] * len(chosen)
        except BaseException as error:  # noqa: BLE001 - code of the user: whatever it raises is the verdict
            worths = [explained(error)] * len(chosen)
        seconds = (time.perf_counter() - start) / len(chosen)
        return [_verdict(index, worth, seconds) for index, worth in zip(group, worths, strict=True)]


def load(order: Order, timeout_s: float = math.inf) -> Judge:
    """What judges by all parts. Raises RewardError: one cannot be loaded."""
    return Judge(
        [Part(label, weight, load_function(spec, options)) for label, spec, weight, options in order], timeout_s
    )


def work(channel: socket.socket) -> int:
    """Set the order's limits and judge until the pool closes the channel; the exit code."""
    requests = channel.makefile("rb")
    if (order := read(requests)) is None:
        return 0
    confine(order["limits"])
    try:
        try:
            judge = load(order["parts"], order["timeout_s"])
        except RewardError as error:
            reason = str(error) + exceeded(error)
            channel.sendall(pack({"error": sendable(reason[:MAX_ERROR_CHARS])}))
            return 1
        channel.sendall(pack({"convention": judge.convention, "is_async": judge.is_async}))
        while (samples := read(requests)) is not None:
            judge.judge(samples, lambda verdicts: channel.sendall(pack(verdicts)))
        return 0
    except MemoryError:
        leave("memory_bytes")


def explained(error: BaseException) -> str:
    """What an exception of the user's code says, and the limit that it comes from."""
    limit = exceeded(error)  # may end this process, so it comes first
    return describe(error) + limit


def _without_waiting(call: Coroutine[Any, Any, list[Verdict]]) -> list[Verdict]:
    """Run a coroutine that waits for nothing, because no part is asynchronous."""
    try:
        call.send(None)
    except StopIteration as ended:
        found: list[Verdict] = ended.value
        return found
    raise AssertionError("a part without `async` has waited")


def _sum(row: Sequence[Worth]) -> Worth:
    """Of all parts of one sample, or the first reason against it."""
    score, metrics = 0.0, dict[str, float]()
    for one in row:
        if isinstance(one, str):
            return one
        score += one[0]
        metrics |= one[1]
    return (score, metrics) if math.isfinite(score) else f"the sum of the parts is {score}"


def _verdict(index: int, worth: Worth, seconds: float) -> Verdict:
    if isinstance(worth, str):
        return index, None, {}, sendable(worth[:MAX_ERROR_CHARS]), seconds
    return index, *worth, None, seconds


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
