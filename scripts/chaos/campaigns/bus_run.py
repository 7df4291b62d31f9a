"""Faults of learner rank 1 and of replay: a real training run, held at a point of an update while one of them is hit.

Rank 1 and replay take no part in an update beyond the gather, so the run is held at a point of the rollout server
rollout-a, or before the gather of rank 0. A fault takes the publisher, the leases or the batches with it.
"""

import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.chaos.campaigns.bus_points import JOINING, POINTS, Bench, Outcome, Point
from scripts.chaos.cluster import Cluster
from scripts.chaos.faults import LEARNER_DIED, REPLAY_DIED
from scripts.chaos.polling import Ended, JsonLines
from scripts.chaos.settings import SERVERS, Variant, recovery_s
from scripts.chaos.watch import Gate

ROLES = ("rank 1", "replay")
HELD = "rollout-a"
VARIANT = Variant(
    "lag 1, two ranks",
    ("replay.async_lag=1", "placement.split=2:2", "weight_bus.bucket_bytes=65536", "learner.batch_deadline_s=20"),
)
TOTAL_STEPS = 120_000  # more than any campaign takes: the run is ended from outside
PACE_S, CUT_S = 0.005, 4.0
CONCERNED = tuple(point for point in POINTS if point.name != "overtaken")
"""The learner waits for each version before it publishes the next, so a healthy run has no such point."""
NEW_EPOCH = ("Epoch", "EpochReady", "forming")  # points that an update has only where the members have changed
GO_ON = 2
"""Versions above the last committed one; the first of them may be under way already, with a batch that was formed."""
LOST_RANK = r"lost 'learner-1'.*\[(closed|silent)\]"
SAYS: dict[tuple[str, str], tuple[str, ...]] = {
    ("rank 1", "kill"): (LEARNER_DIED.replace(r"rank \d+", "rank 1"),),
    ("rank 1", "stop"): (r"other ranks have no part yet\) \[slow\]", LOST_RANK),
    ("rank 1", "cut"): (LOST_RANK,),
    ("replay", "kill"): (REPLAY_DIED,),
    ("replay", "stop"): (r"(waited|waits).*replay.*\[silent\]",),
    ("replay", "cut"): (r"replay: lost '[\w-]+'.*\[closed\]",),
}
"""What some log must say of whom; a replay that is cut off itself says that all others are gone."""
SOMETHING_CHANGED = re.compile(r"replay: lost '|breaks off|the learner stopped|replay .* died|; removed")


class TrainingRun(Bench):
    """One run, of which one role is hit."""

    def __init__(self, work: Path, data: Path, role: str) -> None:
        self.role, self._data = role, data
        self.run = Cluster(work, pace=lambda: PACE_S)
        self._learner = Gate(work / "probes" / "learner")
        self._mark: dict[Path, int] = {}
        self._goal = 0

    def __enter__(self) -> "TrainingRun":
        with ExitStack() as stack:
            stack.enter_context(self.run).start_small(VARIANT, self._data, TOTAL_STEPS)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.run.__exit__()

    @property
    def deadline_s(self) -> float:
        """From any fault of the role to the next version: its own length, and what processes take to come back."""
        return max(map(self.duration_s, ("kill", "stop", "cut", "slow"))) + recovery_s(self.run.config)

    @property
    def pid(self) -> int:
        pids = self.run.pids(self.role)
        if not pids:
            raise Ended(f"{self.role} is not there")
        return pids[0]

    def gate(self, point: Point) -> Gate:
        return self._learner if point.name == "gathering" else self.run.watch.probes[HELD].gate

    def duration_s(self, fault: str) -> float:
        config = self.run.config
        patience = config.network.silent_after_s if self.role == "replay" else config.learner.batch_deadline_s
        return {"kill": 0.0, "stop": patience + 2.0}.get(fault, CUT_S)

    def approach(self, point: Point, hold_s: float, strike: Callable[[], None]) -> None:
        run, watch, gate = self.run, self.run.watch, self.gate(point)
        limit, held = recovery_s(run.config), watch.probes[HELD]
        for server in SERVERS:
            run.wait_for_peers(server)
        if point.name in JOINING:
            gate.aim(point.moment, hold_s)
        if point.name in (*JOINING, *NEW_EPOCH):
            before = run.kill(HELD)
            run.wait(lambda: run.pids(HELD) not in ([], [before]), f"another {HELD}", limit)
        if point.name in NEW_EPOCH:
            held.live = -1
            run.wait(lambda: held.live >= 0, f"another {HELD} to serve", limit)
        if point.name == "refill":
            gate.spoil()
            run.wait(lambda: gate.spoiled, "a spoiled update", limit)
        if point.name == "between updates":
            run.wait(lambda: watch.served >= watch.history.version, "a version at both", limit)
        else:
            if point.name not in JOINING:
                gate.aim(point.moment or point.name, hold_s)
            run.wait(lambda: gate.arrived, f"the point {point.name!r}", limit)
        self._mark, self._goal = run.logs.mark(), watch.history.high + GO_ON
        strike()

    def outlast(self, outcome: Outcome, until: float) -> None:
        """Note when the next version is served, should that be meanwhile."""
        while time.monotonic() < until:
            self.run.tick()
            if not outcome.seconds and self.run.watch.served >= self._goal:
                outcome.seconds = time.monotonic() - self.began

    def recover(self, outcome: Outcome) -> None:
        run, goal = self.run, self._goal
        left = self.began + self.deadline_s - time.monotonic()
        run.wait(lambda: run.watch.served >= goal, f"v{goal} at both rollout servers", left)
        outcome.seconds = outcome.seconds or time.monotonic() - self.began
        run.go_on()
        run.wait(lambda: self._newest_sync()["weight_sync/version"] >= goal, f"the row of v{goal}", left)

    def judge(self, outcome: Outcome) -> None:
        """The hit process must be named in some log; nothing may have changed where the fault changes nothing."""
        outcome.digests_equal = self._newest_sync()["weight_sync/digests_equal"] is True
        logs, says = self.run.logs, SAYS.get((outcome.role, outcome.fault))
        if says is not None:
            line = logs.first(says, self._mark)
            outcome.culprit = f"{line.log}: {line.text}" if line is not None else ""
            outcome.wrong += [] if line is not None else ["no line names it"]
            return
        outcome.culprit = "changes nothing"
        changed = (line for line in logs.since(self._mark) if SOMETHING_CHANGED.search(line.text))
        outcome.wrong += [f"{line.log}: {line.text}" for line in changed]

    def _newest_sync(self) -> dict[str, Any]:
        """The last row of metrics that tells of a broadcast; steps that are repeated make none."""
        metrics = JsonLines.read(self.run.folder / "metrics.jsonl")  # whole: a resumed learner cuts it
        rows = (row for row in reversed(metrics) if row.get("weight_sync/version") is not None)
        return next(rows, {"weight_sync/version": -1})
