"""A simulated clock: events in order, and time that passes slower where both sides share a GPU. Pure."""

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs what is due, in order of time, then of arrival.

    Events are in seconds of work, `now` is in seconds of the wall: where engines and the learner share GPUs, a second
    of work takes `sharing` seconds while both sides are busy.
    """

    def __init__(self, sharing: float = 1.0) -> None:
        self.now = 0.0
        self.work = 0.0
        """Seconds of work of a process that was busy all the time."""
        self.decoding = 0
        """Engines that do."""
        self.updating = False
        """Whether the learner does."""
        self._sharing = sharing
        self._due: list[tuple[float, int, Action]] = []
        self._count = itertools.count()

    def after(self, seconds: float, action: Action) -> None:
        """Have it done once so many seconds of work have passed."""
        heapq.heappush(self._due, (self.work + seconds, next(self._count), action))

    def step(self) -> None:
        """Go to the next event and do what is due. Raises RuntimeError: nothing is, so that the run stands still."""
        if not self._due:
            raise RuntimeError(f"the simulated run stands still at {self.now:.6g} s: nothing is due any more")
        at, _, action = heapq.heappop(self._due)
        self.now += (at - self.work) * (self._sharing if self.decoding and self.updating else 1.0)
        self.work = at
        action()
