"""Restarts in place: how often, and how soon after one another."""

import time
from dataclasses import dataclass, field

SOON_S = 10.0
"""A process that lived for less doubles the wait before its next start."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 8.0
"""Less than network.silent_after_s by default, so peers do not give replay up meanwhile."""
GOOD_RUN_S = 3600.0
"""A process that ran for this long gets its restarts back, so a run of weeks survives its fourth lost machine."""


@dataclass(slots=True)
class Restarts:
    """Restart budget of one process: the first restart is immediate, repeated ones back off."""

    limit: int
    good_run_s: float = GOOD_RUN_S
    backoff_s: float | None = None
    """Wait before the first restart, which doubles with each; None is at once, unless the process dies soon."""
    count: int = 0
    due: float | None = None
    """Monotonic second of the next start; None while nothing has died."""
    _started: float = field(default_factory=time.monotonic)
    _wait_s: float = 0.0

    @property
    def are_used_up(self) -> bool:
        """Whether a death now ends the run."""
        return self.count >= self.limit and not self._ran_well(time.monotonic())

    def _ran_well(self, now: float) -> bool:
        return now - self._started >= self.good_run_s

    def plan(self) -> str:
        """Schedule the next start after a death; returns `restart 2 of 3 in 0.5 s`."""
        now = time.monotonic()
        if self._ran_well(now):
            self.count = 0
        if self.backoff_s is not None:
            self._wait_s = self.backoff_s * 2**self.count
        else:
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
