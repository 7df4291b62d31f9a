"""Restarts in place: how often, and how soon after one another."""

import time
from dataclasses import dataclass, field

SOON_S = 10.0
"""A process that lived for less than this dies again at once: each further start waits twice as long."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0
"""Less than network.silent_after_s by default: who waits for replay does not give it up meanwhile."""


@dataclass(slots=True)
class Restarts:
    """The restarts of one process that others wait for: at once, unless it dies again and again."""

    limit: int
    count: int = 0
    due: float | None = None
    """Monotonic second of the next start; None while nothing has died."""
    _started: float = field(default_factory=time.monotonic)
    _wait_s: float = 0.0

    @property
    def are_used_up(self) -> bool:
        """Whether the next death ends the run."""
        return self.count >= self.limit

    def plan(self) -> str:
        """It has died: set the time of the next start. Returns it in words, `restart 2 of 3 in 0.5 s`."""
        now = time.monotonic()
        again = self.count > 0 and now - self._started < SOON_S
        self._wait_s = min(LONGEST_WAIT_S, 2 * self._wait_s or FIRST_WAIT_S) if again else 0.0
        self.count += 1
        self.due = now + self._wait_s
        return f"restart {self.count} of {self.limit}" + (f" in {self._wait_s:g} s" if self._wait_s else "")

    def is_due(self) -> bool:
        """Whether to start it now; once."""
        now = time.monotonic()
        if self.due is None or now < self.due:
            return False
        self.due, self._started = None, now
        return True
