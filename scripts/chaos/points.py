"""Aiming: wait until a run is at a named point of its protocol, hold it there where possible, let it go."""

import random
import time
from collections.abc import Callable

from scripts.chaos.cluster import Cluster
from scripts.chaos.polling import Hung
from scripts.chaos.proxy import Direction
from scripts.chaos.settings import START_S

AIM_S = 15.0
"""How long to wait for a point before the fault happens at any moment."""
HOLD_S = 1.0
"""Longest that a gate holds a receiver: less than the collective timeout, so that holding alone breaks nothing."""
MIN_REPEATED = 3
"""Steps that must be there to repeat before the learner is killed for it."""


class Aim:
    """One point of one run. `reach`, inject, `was_hit`, `release`."""

    def __init__(self, cluster: Cluster, point: str, server: str, rng: random.Random) -> None:
        self.cluster, self.point, self.server, self.rng = cluster, point, server, rng
        self._mark = cluster.logs.mark()
        self._direction: Direction = rng.choice(["up", "down"])
        self._reached = True

    def reach(self) -> None:
        """Wait for the point; one that does not come in time is given up, and `was_hit` says so."""
        reaching: dict[str, Callable[[], None]] = {
            "any": lambda: self.cluster.rest(self.rng.uniform(0.0, 0.5)),
            "in flight": self._in_flight,
            "formed": lambda: self._until(lambda: self.cluster.watch.batch_is_formed),
            "committed": self._committed,
            "broadcast": self._broadcast,
            "checkpoint": lambda: self._until(lambda: self.cluster.watch.writes_checkpoint),
            "reading": self._reading,
            "repeating": self._repeating,
        }
        try:
            reaching[self.point]()
        except Hung:
            self._reached = False

    def was_hit(self) -> str:
        """The point at which the fault has really met the run: asked right after it."""
        self.cluster.watch.poll()
        watch, link = self.cluster.watch, self.cluster.links[self.server]
        hit: dict[str, Callable[[], bool]] = {
            "any": lambda: True,
            "in flight": lambda: link.held[self._direction].is_set(),
            "formed": lambda: watch.batch_is_formed,
            "committed": lambda: not watch.newest_is_live,
            "broadcast": lambda: watch.probes[self.server].gate.is_aimed,
            "checkpoint": lambda: watch.writes_checkpoint,
            "reading": lambda: self.cluster.logs.first([r"replay ready at"], self._mark) is None,
            "repeating": lambda: watch.is_repeating,
        }
        return self.point if self._reached and hit[self.point]() else "any"

    def release(self) -> None:
        """Let go of what is held."""
        link = self.cluster.links[self.server]
        link.holding.pop(self._direction, None)
        if self.point == "in flight":
            link.frozen.discard(self._direction)
        self.cluster.watch.probes[self.server].gate.release()

    def _until(self, condition: Callable[[], bool], deadline_s: float = AIM_S) -> None:
        self.cluster.wait(condition, f"the point {self.point!r}", deadline_s)

    def _in_flight(self) -> None:
        link = self.cluster.links[self.server]
        link.held[self._direction].clear()
        link.holding[self._direction] = "Group" if self._direction == "up" else "Ack"
        self._until(link.held[self._direction].is_set)

    def _committed(self) -> None:
        watch = self.cluster.watch
        before = watch.account.version
        self._until(lambda: watch.account.version > before and not watch.newest_is_live)

    def _broadcast(self) -> None:
        gate = self.cluster.watch.probes[self.server].gate
        gate.aim("middle bucket", HOLD_S)
        self._until(lambda: gate.arrived)

    def _reading(self) -> None:
        old = self.cluster.kill("replay")
        self._until(lambda: bool(set(self.cluster.pids("replay")) - {old}), START_S)
        self._mark = self.cluster.logs.mark()
        time.sleep(self.rng.uniform(0.0, 1.0))

    def _repeating(self) -> None:
        watch = self.cluster.watch
        self._until(lambda: watch.steps_to_repeat >= MIN_REPEATED)
        before = watch.account.incarnations
        self.cluster.kill("learner")
        self._until(lambda: watch.account.incarnations > before and watch.is_repeating, START_S)
