"""Answers whose rewards are being computed: how many, and since when, so that a slow reward is seen."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Scoring:
    """Calls of the reward that are under way."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[float, int]] = {}
        """Start (time.monotonic) and answers of each call."""

    @contextmanager
    def of(self, answers: int) -> Iterator[None]:
        """While these answers are judged."""
        number = next(self._numbers)
        self._calls[number] = time.monotonic(), answers
        try:
            yield
        finally:
            del self._calls[number]

    def gauges(self, now: float) -> dict[str, float]:
        """`reward_waiting` answers, and the age of the oldest call in seconds."""
        oldest = min((began for began, _ in self._calls.values()), default=now)
        waiting = sum(answers for _, answers in self._calls.values())
        return {"reward_waiting": float(waiting), "reward_oldest_s": max(0.0, now - oldest)}
