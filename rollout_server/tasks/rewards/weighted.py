"""Several reward functions as one: the weighted sum of their scores, each part's score in the metrics.

A part without a score fails the sample: a sum of what is left would be another reward.
"""

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollout_server.tasks.rewards import Sample
from rollout_server.tasks.rewards.judging import Failed, NotAReward, explained, listed, reward_of
from rollout_server.tasks.rewards.loading import RewardFunction, load_function

Order = Sequence[tuple[str, str, float, dict[str, Any]]]
"""(label, spec, weight, options) of each part. One without a label stands alone: its metrics have no prefix."""
Worth = tuple[float, dict[str, float]]
"""What a part adds to the sum, and to the metrics."""


@dataclass(frozen=True, slots=True)
class _Part:
    label: str
    weight: float
    function: RewardFunction

    def worth(self, value: Any, seconds: float) -> Worth:
        """Raises NotAReward, which names the part."""
        try:
            score, metrics = reward_of(value)
        except NotAReward as problem:
            raise NotAReward(f"{self.label} {problem}".strip()) from problem
        if not self.label:
            return self.weight * score, metrics
        named = {f"{self.label}/{name}": item for name, item in metrics.items()}
        return self.weight * score, {self.label: score, f"{self.label}/seconds": seconds} | named


def load_parts(order: Order) -> RewardFunction:
    """The function that judges by all parts. Raises RewardError: one cannot be loaded."""
    parts = [_Part(label, weight, load_function(spec, options)) for label, spec, weight, options in order]
    if len(parts) == 1 and not parts[0].label and parts[0].weight == 1.0:
        return parts[0].function
    has_trl = any(part.function.convention == "trl" for part in parts)
    is_async = any(part.function.is_async for part in parts)
    call: Callable[[Any], Any] = partial(_all if has_trl else _one, parts)
    return RewardFunction("trl" if has_trl else "sample", is_async, call if is_async else partial(_at_once, call))


def _at_once(call: Callable[[Any], Coroutine[Any, Any, Any]], argument: Any) -> Any:
    """Run a coroutine that waits for nothing, because no part is asynchronous."""
    try:
        call(argument).send(None)
    except StopIteration as ended:
        return ended.value
    raise AssertionError("a part without `async` has waited")


async def _value(part: _Part, argument: Any) -> Any:
    value = part.function.call(argument)
    return await value if part.function.is_async else value


async def _worth(part: _Part, sample: Sample) -> Worth:
    start = time.perf_counter()
    return part.worth(await _value(part, sample), time.perf_counter() - start)


async def _one(parts: Sequence[_Part], sample: Sample) -> dict[str, float]:
    return _sum([await _worth(part, sample) for part in parts])


async def _all(parts: Sequence[_Part], samples: Sequence[Sample]) -> list[Any]:
    """A value for each sample; one at a time where a part judges so."""
    columns: list[list[Any]] = []
    for part in parts:
        start = time.perf_counter()
        if part.function.convention == "trl":
            columns.append(_shared(part, await _value(part, samples), len(samples), start))
        else:
            columns.append([await _attempted(part, sample) for sample in samples])
    return [_sum_or_failure(row) for row in zip(*columns, strict=True)]


async def _attempted(part: _Part, sample: Sample) -> Worth | Failed:
    try:
        return await _worth(part, sample)
    except BaseException as error:
        if part.function.is_async and not isinstance(error, Exception):
            raise  # a cancelled call is the timeout of all samples
        return Failed(explained(error))


def _shared(part: _Part, values: Any, num: int, start: float) -> list[Any]:
    try:
        values = listed(values, num)
    except NotAReward as problem:
        raise NotAReward(f"{part.label} {problem}") from problem
    seconds = (time.perf_counter() - start) / num
    return [_worth_or_failure(part, value, seconds) for value in values]


def _worth_or_failure(part: _Part, value: Any, seconds: float) -> Worth | Failed:
    try:
        return part.worth(value, seconds)
    except NotAReward as problem:
        return Failed(f"the reward function {problem}")


def _sum_or_failure(row: Sequence[Worth | Failed]) -> Any:
    worths = []
    for one in row:
        if isinstance(one, Failed):
            return one
        worths.append(one)
    return _sum(worths)


def _sum(worths: Sequence[Worth]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for _, named in worths:
        metrics |= named
    return {"score": sum(score for score, _ in worths)} | metrics
