"""What an update costs running requests: the gap between two of their tokens, less the median gap.

A few requests at a time report every token (the probes); the others report every so many. Only for benchmarks.
"""

import time
from collections import deque

from rollout_server.engines.sglang.requests import quantile

KEPT = 4096
PROBES = 1


class TokenGaps:
    """Gaps between tokens of the probe, and those that an update fell into."""

    def __init__(self) -> None:
        self._probes: set[str] = set()
        self._last: float | None = None
        self._gaps: deque[float] = deque(maxlen=KEPT)
        self._pauses: deque[float] = deque(maxlen=KEPT)
        self._resumed = False
        self._paused_at = 0.0
        self._stopped: deque[float] = deque(maxlen=KEPT)

    def claim(self, rid: str) -> bool:
        """Whether this request is to report every token."""
        if len(self._probes) >= PROBES:
            return False
        self._probes.add(rid)
        self._last = None
        return True

    def release(self, rid: str) -> None:
        """The request has ended."""
        self._probes.discard(rid)
        self._last = None

    def token(self, now: float) -> None:
        """A token of the probe arrived."""
        if self._last is not None:
            gap = now - self._last
            if self._resumed:
                self._pauses.append(gap)
            else:
                self._gaps.append(gap)
        self._resumed = False
        self._last = now

    def pause(self) -> None:
        """An update stops the engine."""
        self._paused_at = time.monotonic()

    def resume(self) -> None:
        """The engine goes on: the next token's gap holds the update."""
        self._resumed = self._last is not None
        self._stopped.append(time.monotonic() - self._paused_at)

    def detail(self) -> dict[str, float]:
        """Milliseconds: gaps over an update less the median gap, and how long the engine was stopped."""
        median = quantile(self._gaps, 0.5)
        pauses = [max(0.0, gap - median) for gap in self._pauses]
        return {
            "token_gap_ms_p50": 1e3 * median,
            "pause_ms_p50": 1e3 * quantile(pauses, 0.5),
            "pause_ms_p99": 1e3 * quantile(pauses, 0.99),
            "pause_ms_max": 1e3 * max(pauses, default=0.0),
            "pause_ms_last": 1e3 * (pauses[-1] if pauses else 0.0),
            "pause_samples": float(len(pauses)),
            "stopped_ms_p50": 1e3 * quantile(self._stopped, 0.5),
        }
