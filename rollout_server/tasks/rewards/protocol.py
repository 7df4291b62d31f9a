"""Between pool and reward process, in frames (children/frames.py).

| from   | message                                                                                     |
|--------|---------------------------------------------------------------------------------------------|
| pool   | first: {"parts": [part, ...], "timeout_s": float, "limits": {key: int}}, then [sample, ...] |
| worker | first: {"convention": str, "is_async": bool} or {"error": str}                              |
| worker | per request, until every sample has one: [[index, score, metrics, error, seconds], ...]     |

A part is [label, spec, weight, options] (rewards/weighted.py).

Code of the user shares the worker's process and may have written its replies: the pool checks them.
"""

import math
from typing import Any, get_args

from rollout_server.tasks.rewards import RewardError, RewardOutcome
from rollout_server.tasks.rewards.loading import Convention
from rollout_server.tasks.workers.frames import shown

MAX_REQUEST_BYTES = 32 * 1024 * 1024
MAX_REPLY_BYTES = 1024 * 1024
MAX_ERROR_CHARS = 2000
"""Each at most 4 bytes long."""
MAX_METRICS = 64
REPLY_LIMITS = {
    "max_array_len": 1024,
    "max_map_len": MAX_METRICS,
    "max_str_len": 4 * MAX_ERROR_CHARS,
    "max_bin_len": 0,
    "max_ext_len": 0,
}
"""A reply that announces more in any place is refused before memory is taken for it. msgpack itself goes 1024 deep, on
a stack of its own; what is deeper than a verdict is then refused by its type, without looking into it."""


def read_answer(reply: Any) -> tuple[str, bool]:
    """From the decoded first reply: the loaded function's convention, and whether it is asynchronous.

    Raises:
        RewardError: the worker found no function; the message is its own.
        ValueError: the reply is neither a known convention nor an error.
    """
    match reply:
        case {"error": str(error)} if len(reply) == 1:
            raise RewardError(error)
        case {"convention": str(convention), "is_async": bool(is_async)} if convention in get_args(Convention):
            return convention, is_async
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
