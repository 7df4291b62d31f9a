"""In the worker process: runs a reward function over samples, checks what it returns."""

import math
import numbers
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from configs.errors import SlipstreamError, kind_of
from rollout_server.tasks.rewards import Sample
from rollout_server.tasks.rewards.limits import exceeded
from rollout_server.tasks.rewards.loading import RewardFunction
from rollout_server.tasks.rewards.protocol import MAX_ERROR_CHARS, MAX_METRICS
from rollout_server.tasks.workers.loading import describe

Verdict = tuple[int, float | None, dict[str, float], str | None, float]
"""(index in the request, score or None, metrics, error or None, seconds): one entry of a worker's reply."""
Send = Callable[[list[Verdict]], None]
NOT_APPLICABLE = "not_applicable"
FLUSH_S = 0.02
"""Verdicts younger than this are sent together; a pool that kills the worker judges them anew."""


class NotAReward(SlipstreamError, ValueError, code="SLIP-REWARD-02"):
    """The function returned something that is no reward."""


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of one sample's value in a list: why it has none."""

    reason: str


def judge(function: RewardFunction, samples: Sequence[Sample], send: Send) -> None:
    """Call a synchronous function on all samples and send every verdict once."""
    start = flushed = time.perf_counter()
    if function.convention == "trl":
        send(_together(*_attempt(function, samples), len(samples), start))
        return
    pending: list[Verdict] = []
    for index, sample in enumerate(samples):
        start = time.perf_counter()
        value, error = _attempt(function, sample)
        now = time.perf_counter()
        pending.append(_verdict(index, value, error, now - start))
        if now - flushed > FLUSH_S:
            send(pending)
            pending, flushed = [], now
    if pending:
        send(pending)


def _attempt(function: RewardFunction, argument: Any) -> tuple[Any, str | None]:
    try:
        return function.call(argument), None
    except BaseException as error:  # noqa: BLE001 - code of the user: whatever it raises is the verdict
        return None, explained(error)


async def judge_async(function: RewardFunction, timeout_s: float, samples: Sequence[Sample], send: Send) -> None:
    """Call an asynchronous function on all samples at once; send each verdict when it comes.

    A call that takes longer than the timeout is cancelled here and the process lives on; the pool kills it only
    when the function blocks the loop.
    """
    import asyncio  # takes 40 ms, which synchronous functions do not need

    async def attempt(argument: Any) -> tuple[Any, str | None]:
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await function.call(argument), None
        except TimeoutError as error:
            return None, f"timed out after {timeout_s:g} s" if limit.expired() else explained(error)
        except BaseException as error:  # noqa: BLE001 - code of the user: whatever it raises is the verdict
            return None, explained(error)

    async def one(index: int, sample: Sample) -> None:
        start = time.perf_counter()
        value, error = await attempt(sample)
        send([_verdict(index, value, error, time.perf_counter() - start)])

    if function.convention == "trl":
        start = time.perf_counter()
        send(_together(*await attempt(samples), len(samples), start))
    else:
        await asyncio.gather(*(one(index, sample) for index, sample in enumerate(samples)))


def explained(error: BaseException) -> str:
    """What an exception of the user's code says, and the limit that it comes from."""
    limit = exceeded(error)  # may end this process, so it comes first
    return describe(error) + limit


def _verdict(index: int, value: Any, error: str | None, seconds: float) -> Verdict:
    """The verdict on one sample, from what its call returned or raised."""
    if isinstance(value, Failed):
        error = value.reason
    if error is None:
        try:
            score, metrics = reward_of(value)
            return index, score, metrics, None, seconds
        except NotAReward as problem:
            error = f"the reward function {problem}; it must be a finite number or a dict with one under 'score'"
        except BaseException as problem:  # noqa: BLE001 - reading an object of the user runs code of the user
            error = f"what the reward function returned cannot be read: {explained(problem)}"
    return index, None, {}, sendable(error[:MAX_ERROR_CHARS]), seconds


def _together(values: Any, error: str | None, num: int, start: float) -> list[Verdict]:
    """The verdicts of one call on `num` samples (TRL) that began at `start`.

    None says that the function does not apply to a sample. TRL then has the reward 0 where no other function applies,
    and there is one function here; NOT_APPLICABLE is the share of such samples.
    """
    seconds = (time.perf_counter() - start) / num
    if error is None:
        try:
            values = listed(values, num)
        except NotAReward as problem:
            error = f"the reward function {problem}"
    return [_verdict(index, None if error else values[index], error, seconds) for index in range(num)]


def listed(values: Any, num: int) -> list[Any]:
    """One value for each of `num` samples, from what a TRL function returned. Raises NotAReward."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)) or len(values) != num:
        found = f"{len(values)} of them" if isinstance(values, (list, tuple)) else kind_of(values)
        raise NotAReward(f"must return a list of {num} numbers, found {found}")
    if any(value is None for value in values):
        return [{"score": 0.0 if v is None else v, NOT_APPLICABLE: float(v is None)} for v in values]
    return list(values)


def reward_of(value: Any) -> tuple[float, dict[str, float]]:
    """Score and metrics of a returned number or dict.

    Raises:
        NotAReward: no finite number where one is needed.
    """
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


def sendable(text: str) -> str:
    """The text, with a question mark for each surrogate: those have no UTF-8."""
    return text.encode("utf-8", "replace").decode()


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
        raise NotAReward(f"{what} {shown}")
    if not math.isfinite(number):
        raise NotAReward(f"{what} {number}")
    return number
