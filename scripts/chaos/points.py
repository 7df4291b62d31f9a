"""Aiming: wait until a run stands at a named point of its protocol, hold it there where that can be done, let it go."""

import random
import time
from collections.abc import Callable
from signal import SIGKILL

from scripts.chaos import processes
from scripts.chaos.proxy import Direction
from scripts.chaos.settings import START_S
from scripts.chaos.trial import Hung, Trial

AIM_S = 15.0
"""How long to wait for a point before the fault happens at any moment."""
MIN_REPEATED = 3
"""Steps that must be there to repeat before the learner is killed for it."""


class Aim:
    """One point of one run. `reach`, inject, `was_hit`, `release`."""

    def __init__(self, trial: Trial, point: str, server: str, rng: random.Random) -> None:
        self.trial, self.point, self.server, self.rng = trial, point, server, rng
        self._mark = trial.logs.mark()
        self._direction: Direction = rng.choice(["up", "down"])
        self._reached = True

    def reach(self) -> None:
        """Wait for the point; one that does not come in time is given up, and `was_hit` says so."""
        reaching: dict[str, Callable[[], None]] = {
            "any": lambda: self.trial.rest(self.rng.uniform(0.0, 0.5)),
            "in flight": self._in_flight,
            "formed": lambda: self._until(lambda: self.trial.watch.batch_is_formed),
            "committed": self._committed,
            "broadcast": self._broadcast,
            "checkpoint": lambda: self._until(lambda: self.trial.watch.writes_checkpoint),
            "reading": self._reading,
            "repeating": self._repeating,
        }
        try:
            reaching[self.point]()
        except Hung:
            self._reached = False

    def was_hit(self) -> str:
        """The point at which the fault has really met the run: asked right after it."""
        self.trial.watch.poll()
        watch, link = self.trial.watch, self.trial.links[self.server]
        hit: dict[str, Callable[[], bool]] = {
            "any": lambda: True,
            "in flight": lambda: link.held[self._direction].is_set(),
            "formed": lambda: watch.batch_is_formed,
            "committed": lambda: not watch.newest_is_live,
            "broadcast": lambda: watch.producers[self.server].hold.exists(),
            "checkpoint": lambda: watch.writes_checkpoint,
            "reading": lambda: self.trial.logs.first([r"replay ready at"], self._mark) is None,
            "repeating": lambda: watch.is_repeating,
        }
        return self.point if self._reached and hit[self.point]() else "any"

    def release(self) -> None:
        """Let go of what is held."""
        link = self.trial.links[self.server]
        link.holding.pop(self._direction, None)
        if self.point == "in flight":
            link.frozen.discard(self._direction)
        self.trial.watch.producers[self.server].hold.unlink(missing_ok=True)

    def _until(self, condition: Callable[[], bool], deadline_s: float = AIM_S) -> None:
        self.trial.wait(condition, f"the point {self.point!r}", deadline_s)

    def _in_flight(self) -> None:
        link = self.trial.links[self.server]
        link.held[self._direction].clear()
        link.holding[self._direction] = "Group" if self._direction == "up" else "Ack"
        self._until(link.held[self._direction].is_set)

    def _committed(self) -> None:
        watch = self.trial.watch
        before = watch.version
        self._until(lambda: watch.version > before and not watch.newest_is_live)

    def _broadcast(self) -> None:
        producer = self.trial.watch.producers[self.server]
        before = producer.broadcasts
        producer.hold.touch()
        self._until(lambda: producer.broadcasts > before)

    def _reading(self) -> None:
        (old,) = self.trial.pids("replay")
        processes.send(old, SIGKILL)
        self._until(lambda: bool(set(self.trial.pids("replay")) - {old}), START_S)
        self._mark = self.trial.logs.mark()
        time.sleep(self.rng.uniform(0.0, 1.0))

    def _repeating(self) -> None:
        watch = self.trial.watch
        self._until(lambda: watch.steps_to_repeat >= MIN_REPEATED)
        before = watch.incarnation
        processes.send(self.trial.pids("learner")[0], SIGKILL)
        self._until(lambda: watch.incarnation > before and watch.is_repeating, START_S)
