"""Faults of learner rank 1 and of replay: a real training run, held at a point of an update while one of them is hit.

Rank 1 and replay take no part in an update beyond the gather, so the run is held at a point of the rollout server
rollout-a, or before the gather of rank 0. A fault takes the publisher, the leases or the batches with it.
"""

import re
import time
from pathlib import Path
from typing import Any

from configs.schema import Config
from scripts.chaos import checker
from scripts.chaos.campaigns.bus_points import FAULTS, HOLD_S, JOINING, POINTS, Outcome, Point
from scripts.chaos.cluster import Cluster
from scripts.chaos.faults import LEARNER_DIED, REPLAY_DIED
from scripts.chaos.polling import Ended, Hung, JsonLines
from scripts.chaos.settings import SERVERS, Variant, recovery_s
from scripts.chaos.watch import Gate

ROLES = ("rank 1", "replay")
HELD = "rollout-a"
VARIANT = Variant(
    "lag 1, two ranks",
    ("replay.async_lag=1", "placement.split=2:2", "weight_bus.bucket_bytes=65536", "learner.batch_deadline_s=20"),
)
TOTAL_STEPS = 120_000
"""More than any campaign takes: the run is ended from outside."""
PACE_S = 0.005
CONCERNED = tuple(point for point in POINTS if point.name != "overtaken")
"""The learner waits for each version before it publishes the next, so a healthy run has no such point."""
NEW_EPOCH = ("Epoch", "EpochReady", "forming")
"""Points that an update has only where the members have changed."""
CUT_S = 4.0
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


def duration_s(role: str, fault: str, config: Config) -> float:
    """How long a fault lasts: longer than those that notice it wait."""
    patience = config.network.silent_after_s if role == "replay" else config.learner.batch_deadline_s
    return {"kill": 0.0, "stop": patience + 2.0, "cut": CUT_S, "slow": CUT_S}[fault]


class TrainingRun:
    """One run and one case after the other; a context manager."""

    def __init__(self, work: Path, data: Path) -> None:
        self._work, self._data = work, data
        self._cluster = Cluster(work, pace=lambda: PACE_S)
        self._learner = Gate(work / "probes" / "learner")

    def __enter__(self) -> "TrainingRun":
        run = self._cluster.__enter__()
        try:
            run.start_small(VARIANT, self._data, TOTAL_STEPS)
        except BaseException:
            run.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.__exit__()

    def deadline_s(self, role: str) -> float:
        """From any fault of a role to the next version: its own length, and what processes take to come back."""
        config = self._cluster.config
        return max(duration_s(role, name, config) for name in ("kill", "stop", "cut", "slow")) + recovery_s(config)

    def case(self, role: str, fault: str, point: Point) -> Outcome:
        """A fault of a role at a point, until the run has gone on."""
        run, limit = self._cluster, self.deadline_s(role)
        outcome = Outcome(role=role, fault=fault, point=point.name, deadline_s=limit)
        gate = self._learner if point.name == "gathering" else run.watch.probes[HELD].gate
        began = 0.0
        try:
            for server in SERVERS:
                run.wait_for_peers(server)
            self._approach(point, gate)
            mark, goal = run.logs.mark(), run.watch.account.high + GO_ON
            with FAULTS[fault][1](self._pid(role)):
                began = time.monotonic()
                gate.release()
                self._last(began + duration_s(role, fault, run.config), goal, outcome, began)
            left = began + limit - time.monotonic()
            run.wait(lambda: run.watch.served >= goal, f"v{goal} at both rollout servers", left)
            outcome.seconds = outcome.seconds or time.monotonic() - began
            run.go_on()
            run.wait(lambda: self._newest_sync()["weight_sync/version"] >= goal, f"the row of v{goal}", left)
            outcome.digests_equal = self._newest_sync()["weight_sync/digests_equal"] is True
            self._judge(outcome, mark)
        except (Hung, Ended) as hung:
            outcome.hung = str(hung)
            outcome.seconds = time.monotonic() - began if began else 0.0
        finally:
            gate.release()
        return outcome

    def check(self) -> checker.Report:
        """The checker's report, when all have ended."""
        self._cluster.watch.poll()
        records = sorted(self._work.glob("probes/*/events.jsonl"))
        return checker.check(self._work / "run", journal=self._work / "journal", acks=records)

    def _pid(self, role: str) -> int:
        pid = self._cluster.pids("replay")[0] if role == "replay" else self._cluster.rank_pid(1)
        if pid is None:
            raise Ended(f"{role} is not there")
        return pid

    def _newest_sync(self) -> dict[str, Any]:
        """The last row of metrics that tells of a broadcast; steps that are repeated make none."""
        metrics = JsonLines.read(self._work / "run" / "metrics.jsonl")  # whole: a resumed learner cuts it
        rows = (row for row in reversed(metrics) if row.get("weight_sync/version") is not None)
        return next(rows, {"weight_sync/version": -1})

    def _approach(self, point: Point, gate: Gate) -> None:
        """Hold the run at the point."""
        run, held = self._cluster, self._cluster.watch.probes[HELD]
        limit = recovery_s(run.config)
        if point.name == "between updates":
            run.wait(lambda: run.watch.served >= run.watch.account.version, "a version at both", limit)
            return
        if point.name in JOINING:
            gate.aim(point.moment, HOLD_S)
        if point.name in (*JOINING, *NEW_EPOCH):
            before = run.kill(HELD)
            run.wait(lambda: run.pids(HELD) not in ([], [before]), f"another {HELD}", limit)
        if point.name in NEW_EPOCH:
            held.live = -1
            run.wait(lambda: held.live >= 0, f"another {HELD} to serve", limit)
        if point.name == "refill":
            gate.spoil()
            run.wait(lambda: gate.spoiled, "a spoiled update", limit)
        if point.name not in JOINING:
            gate.aim(point.moment or point.name, HOLD_S)
        run.wait(lambda: gate.arrived, f"the point {point.name!r}", limit)

    def _last(self, until: float, goal: int, outcome: Outcome, began: float) -> None:
        """Let a fault last, and note when the next version is served, should that be meanwhile."""
        while time.monotonic() < until:
            self._cluster.tick()
            if not outcome.seconds and self._cluster.watch.served >= goal:
                outcome.seconds = time.monotonic() - began

    def _judge(self, outcome: Outcome, mark: dict[Path, int]) -> None:
        """The hit process must be named in some log; nothing may have changed where the fault changes nothing."""
        logs, says = self._cluster.logs, SAYS.get((outcome.role, outcome.fault), ())
        if says:
            line = logs.first(says, mark)
            outcome.culprit = f"{line.log}: {line.text}" if line is not None else ""
            outcome.wrong += [] if line is not None else ["no line names it"]
            return
        outcome.culprit = "changes nothing"
        changed = (line for line in logs.since(mark) if SOMETHING_CHANGED.search(line.text))
        outcome.wrong += [f"{line.log}: {line.text}" for line in changed]
