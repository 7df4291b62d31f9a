"""Checks what a reward process answers before the pool believes it: user code shares that process."""

import math
import reprlib
from dataclasses import dataclass
from typing import Any, get_args

from rollout_server.rewards.base import RewardOutcome
from rollout_server.rewards.framing import MAX_ERROR_CHARS, MAX_METRICS
from rollout_server.rewards.loading import Convention


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a process says about the function that it was told to load."""

    convention: str = ""
    is_async: bool = False
    error: str | None = None
    """Why there is no function, or None."""


def read_answer(reply: Any) -> Answer:
    """The decoded first reply.

    Raises:
        ValueError: it is neither a known convention nor an error.
    """
    match reply:
        case {"error": str(error)} if len(reply) == 1:
            return Answer(error=error)
        case {"convention": str(convention), "is_async": bool(is_async)} if convention in get_args(Convention):
            return Answer(convention=convention, is_async=is_async)
    raise ValueError(f"expected a convention or an error, found {shown(reply)}")


def read_verdicts(reply: Any, missing: set[int]) -> list[tuple[int, RewardOutcome]]:
    """The outcomes in a decoded reply; their indices are removed from `missing`.

    Raises:
        ValueError: the reply is not a list of verdicts on samples that still miss one.
    """
    if not isinstance(reply, list) or not reply:
        raise ValueError(f"expected verdicts, found {shown(reply)}")
    outcomes = []
    for entry in reply:
        if not isinstance(entry, list) or len(entry) != 5:
            raise ValueError(f"expected a verdict, found {shown(entry)}")
        index = entry[0]
        if type(index) is not int or index not in missing:
            raise ValueError(f"a verdict on sample {shown(index)}, which was not asked for")
        missing.remove(index)
        outcomes.append((index, _outcome(*entry[1:])))
    return outcomes


def _outcome(score: Any, metrics: Any, error: Any, seconds: Any) -> RewardOutcome:
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise ValueError(f"metrics {shown(metrics)}")
    for key, value in metrics.items():
        if not isinstance(key, str) or not _is_finite(value):
            raise ValueError(f"metric {shown(key)} = {shown(value)}")
    if not _is_finite(seconds) or seconds < 0:
        raise ValueError(f"seconds {shown(seconds)}")
    if isinstance(error, str) and score is None:
        return RewardOutcome(score=math.nan, error=error[:MAX_ERROR_CHARS], seconds=seconds)
    if error is not None or not _is_finite(score):
        raise ValueError(f"score {shown(score)} with error {shown(error)}")
    return RewardOutcome(score=score, metrics=metrics, seconds=seconds)


def _is_finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def shown(value: Any) -> str:
    """A decoded value for a message: a few items of each level and few levels, however deep and long it is."""
    return reprlib.repr(value)[:200]
