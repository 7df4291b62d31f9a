"""Checks what a reward process answers before the pool believes it: user code shares that process."""

import math
from typing import Any

from rollout_server.rewards.base import RewardOutcome
from rollout_server.rewards.framing import MAX_ERROR_CHARS, MAX_METRICS


def read_verdicts(reply: Any, missing: set[int]) -> list[tuple[int, RewardOutcome]]:
    """The outcomes in a decoded reply; their indices are removed from `missing`.

    Raises:
        ValueError: the reply is not a list of verdicts on samples that still miss one.
    """
    if not isinstance(reply, list) or not reply:
        raise ValueError(f"expected verdicts, found {str(reply)[:60]!r}")
    outcomes = []
    for entry in reply:
        if not isinstance(entry, list) or len(entry) != 5:
            raise ValueError(f"expected a verdict, found {str(entry)[:60]!r}")
        index = entry[0]
        if type(index) is not int or index not in missing:
            raise ValueError(f"a verdict on sample {str(index)[:20]!r}, which was not asked for")
        missing.remove(index)
        outcomes.append((index, _outcome(*entry[1:])))
    return outcomes


def _outcome(score: Any, metrics: Any, error: Any, seconds: Any) -> RewardOutcome:
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        raise ValueError(f"metrics {str(metrics)[:60]!r}")
    for key, value in metrics.items():
        if not isinstance(key, str) or not _is_finite(value):
            raise ValueError(f"metric {str(key)[:60]!r} = {str(value)[:60]!r}")
    if not _is_finite(seconds):
        raise ValueError(f"seconds {str(seconds)[:60]!r}")
    if isinstance(error, str) and score is None:
        return RewardOutcome(score=math.nan, error=error[:MAX_ERROR_CHARS], seconds=seconds)
    if error is not None or not _is_finite(score):
        raise ValueError(f"score {str(score)[:60]!r} with error {str(error)[:60]!r}")
    return RewardOutcome(score=score, metrics=metrics, seconds=seconds)


def _is_finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)
