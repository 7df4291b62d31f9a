"""Growth of a quantity over a window, robust against what comes and goes, and when it is a leak. No I/O, no clock.

A window is cut into BLOCKS, of each of which the least value counts: what a process keeps, without what it needs for a
moment. The slope is the median of the slopes between all pairs of blocks (Theil 1950, Sen 1968); it is steady where
Kendall's tau of the blocks is at least STEADY, for which twelve blocks in random order have less than one chance in a
thousand. A single jump, such as that of the first evaluation, has a tau of 0.55 at most.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median

BLOCKS = 12
STEADY = 0.7
HOUR_S = 3600.0
COUNT_PER_H = 12.0
"""Descriptors or threads an hour that are a leak: a process that may open 1,024 files is at that after three days."""
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Growth:
    """How a quantity moved over a window."""

    per_hour: float
    steadiness: float
    """Kendall's tau: 1 where it only ever rose, -1 where it only ever fell."""
    now: float
    """The last value."""


def growth(times: Sequence[float], values: Sequence[float]) -> Growth | None:
    """Of samples over a window, seconds and any unit; None with fewer than two samples a block.

    Example: a value that rises by 1 a second has Growth(3600.0, 1.0, ...).
    """
    if len(times) < 2 * BLOCKS or times[-1] <= times[0]:
        return None
    first, width = times[0], (times[-1] - times[0]) / BLOCKS
    least: dict[int, float] = {}
    for time, value in zip(times, values, strict=True):
        block = min(int((time - first) / width), BLOCKS - 1)
        least[block] = min(value, least.get(block, value))
    if len(least) < BLOCKS // 2:
        return None
    pairs = [(a, b, least[b] - least[a]) for a, b in combinations(sorted(least), 2)]
    slope = median(rise / ((b - a) * width) for a, b, rise in pairs)
    tau = sum((rise > 0) - (rise < 0) for *_, rise in pairs) / len(pairs)
    return Growth(slope * HOUR_S, tau, values[-1])


@dataclass(slots=True)
class Series:
    """Samples of one quantity of one role, over the last window."""

    window_s: float
    limit_per_h: float
    """Growth above this is a leak."""
    times: deque[float] = field(default_factory=deque)
    values: deque[float] = field(default_factory=deque)
    _begun: float | None = None
    _said: float = float("-inf")

    def add(self, now: float, value: float) -> None:
        """Add a sample, and forget those that have left the window."""
        if self._begun is None:
            self._begun = now
        self.times.append(now)
        self.values.append(value)
        while self.times[0] < now - self.window_s:
            self.times.popleft()
            self.values.popleft()

    def growth(self) -> Growth | None:
        """Over the last window; None until a whole window has passed after the first one.

        Processes grow while they warm up: buffers and caches are made in the first steps, evaluations, checkpoints.
        """
        if self._begun is None or self.times[-1] - self._begun < 2 * self.window_s:
            return None
        return growth(list(self.times), list(self.values))

    def is_leak(self, found: Growth | None, now: float) -> bool:
        """Whether this growth is a leak, of which nothing was said within the last window."""
        if found is None or found.per_hour <= self.limit_per_h or found.steadiness < STEADY:
            return False
        if now - self._said < self.window_s:
            return False
        self._said = now
        return True
