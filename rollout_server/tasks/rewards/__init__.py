"""Rewards: functions that judge answers, and the processes that they run in (rewards/pool.py).

Worker processes import this package and start anew after every timeout: nothing heavy may be imported here.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from configs.errors import SlipstreamError

LONGEST_PAUSE_S = 20.0
"""Between two tries of an endpoint."""


class RewardError(SlipstreamError, ValueError, code="SLIP-REWARD-01"):
    """The reward function cannot be loaded, or its processes do not start."""


class NotScored(SlipstreamError, ValueError, code="SLIP-REWARD-06"):
    """One conversation has no score; the message says why."""


class Sample(TypedDict):
    """One answer as a reward function sees it: a dict with these keys.

    Example: {"prompt": "312=", "completion": "123", "ground_truth": "123", "data_source": "train",
    "extra_info": {}, "columns": {}, "num_tokens": 4, "finish_reason": "stop"}
    """

    prompt: str | list[dict[str, str]]
    completion: str
    """The decoded answer without special tokens."""
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any]
    columns: dict[str, Any]
    """Every other column of the row."""
    num_tokens: int
    """Tokens of the answer, the stop token included."""
    finish_reason: str
    """`stop`, or `length` for an answer that was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """Result of judging one sample."""

    score: float
    """NaN when `error` is set, so that no error can pass for a score."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Other numbers that the function returned."""
    error: str | None = None
    """Why there is no score, or None."""
    seconds: float
    """Time that the function took for this sample (a call that judges several: their share of it)."""


def added(outcomes: Sequence[RewardOutcome]) -> RewardOutcome:
    """The outcome of all parts of a reward on one sample: their sum, or the first error."""
    seconds = sum(outcome.seconds for outcome in outcomes)
    for outcome in outcomes:
        if outcome.error is not None:
            return RewardOutcome(score=math.nan, error=outcome.error, seconds=seconds)
    metrics: dict[str, float] = {}
    for outcome in outcomes:
        metrics |= outcome.metrics
    score = sum(outcome.score for outcome in outcomes)
    if not math.isfinite(score):
        return RewardOutcome(score=math.nan, error=f"the sum of the parts is {score}", seconds=seconds)
    return RewardOutcome(score=score, metrics=metrics, seconds=seconds)


def load_of(began: Iterable[float], now: float, workers: int) -> dict[str, float]:
    """Gauges of judges: answers that wait for a score, how many are judged at once, and the age of the oldest (s)."""
    times = list(began)
    return {
        "rewards_waiting": float(len(times)),
        "reward_workers": float(workers),
        "reward_oldest_s": now - min(times, default=now),
    }


class Rewards(Protocol):
    """What judges the answers of a run."""

    def gauges(self) -> dict[str, float]:
        """What it has to do, as `load_of`."""

    async def score(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Outcomes of samples, in their order. Raises RewardError: it cannot judge any more."""
