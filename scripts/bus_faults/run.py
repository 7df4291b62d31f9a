"""Faults of learner rank 1 and of replay: a real training run, held at a point of an update while one of them is hit.

Everything but the gates is what scripts/chaos starts: the launcher, replay, two learner ranks, two rollout servers.
Rank 1 and replay take no part in an update beyond the gather, so the run is held at a point of the rollout server
rollout-a, or before the gather of rank 0. Who is hit takes the publisher, the leases or the batches with it.
"""

import json
import re
import time
from pathlib import Path
from signal import SIGKILL
from types import TracebackType
from typing import Any

from configs.schema import Config
from scripts.bus_faults.faults import Fault
from scripts.bus_faults.gates import Hand
from scripts.bus_faults.points import HOLD_S, JOINING, POINTS, Outcome, Point
from scripts.bus_faults.server import SITE
from scripts.chaos import processes, trial
from scripts.chaos.checker import Report, check
from scripts.chaos.settings import SERVERS, Variant, recovery_s
from scripts.chaos.table import LEARNER_DIED, REPLAY_DIED

ROLES = ("rank 1", "replay")
HELD = "rollout-a"
VARIANT = Variant(
    "lag 1, two ranks",
    ("replay.async_lag=1", "placement.split=2:2", "weight_bus.bucket_bytes=65536", "learner.batch_deadline_s=20"),
)
ENDLESS = 10_000
"""Faults that the run has steps for: it is ended from outside."""
PACE = "0.005"
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
"""What some log must say of whom; of a replay that is cut off, replay itself says that all others are gone."""
SOMETHING_CHANGED = re.compile(r"replay: lost '|breaks off|the learner stopped|replay .* died|; removed")


class GatedTrial(trial.Trial):
    """A run with gates in its rollout servers and in learner rank 0."""

    def __init__(self, work: Path, data: Path) -> None:
        super().__init__(VARIANT, work, data, ENDLESS)
        self.hands = {name: Hand(work / "gates" / name) for name in (*SERVERS, "learner")}
        site = SITE.format(folder=str(work / "gates" / "learner"))
        (work / "site" / "sitecustomize.py").write_text(site, encoding="utf-8")

    def _serve(self, name: str) -> None:
        words = [str(self.watch.producers[name].events), str(self.work / "gates" / name)]
        words += ["--config", f"{self.folder}/config.yaml"]
        words += ["--replay", self.links[name].address, "--server-name", name]
        self.servers[name] = self._start("scripts.bus_faults.server", *words, output=self.outputs[name])

    def _set_pace(self) -> None:
        """Always the same: this run has no end that it must not reach."""
        if self._pace != PACE:
            (self.work / "pace").write_text(PACE, encoding="utf-8")
            self._pace = PACE

    def pid(self, role: str) -> int:
        """Of replay, or of learner rank 1."""
        if role == "replay":
            return self.pids("replay")[0]
        return next(pid for pid in self.pids("learner") if b"RANK=1" in environment(pid))

    def newest_sync(self) -> dict[str, Any]:
        """The last row of metrics.jsonl that tells of a broadcast; steps that are repeated make none."""
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        for line in reversed(text[: text.rfind("\n") + 1].splitlines()):
            row: dict[str, Any] = json.loads(line)
            if row.get("weight_sync/version") is not None:
                return row
        return {"weight_sync/version": -1}

    @property
    def served(self) -> int:
        """The newest version with which both rollout servers have asked for leases."""
        return min(producer.live for producer in self.watch.producers.values())


class RunBench:
    """One run and one case after the other; a context manager."""

    def __init__(self, work: Path, data: Path) -> None:
        self._work = work
        self._trial = GatedTrial(work, data)

    def __enter__(self) -> "RunBench":
        self._trial.__enter__()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._trial.__exit__()

    def deadline_s(self, role: str) -> float:
        """From any fault of a role to the next version: its own length, and what processes take to come back."""
        config = self._trial.config
        return max(lasts_s(role, name, config) for name in ("kill", "stop", "cut", "slow")) + recovery_s(config)

    def case(self, role: str, fault: Fault, point: Point) -> Outcome:
        """A fault of a role at a point, until the run has gone on."""
        outcome, run = Outcome(role=role, fault=fault.name, point=point.name), self._trial
        hand = run.hands["learner" if point.name == "gathering" else HELD]
        began = 0.0
        try:
            for server in SERVERS:
                run.wait_for_peers(server)
            self._approach(point, hand)
            mark, goal = run.logs.mark(), run.watch.high + GO_ON
            fault.begin(run.pid(role))
            began = time.monotonic()
            hand.release()
            try:
                self._last(began + lasts_s(role, fault.name, run.config), goal, outcome, began)
            finally:
                fault.end()
            left = began + self.deadline_s(role) - time.monotonic()
            run.wait(lambda: run.served >= goal, f"v{goal} at both rollout servers", left)
            outcome.seconds = outcome.seconds or time.monotonic() - began
            run.go_on()
            run.wait(lambda: run.newest_sync()["weight_sync/version"] >= goal, f"the row of v{goal}", left)
            outcome.digests_equal = run.newest_sync()["weight_sync/digests_equal"] is True
            self._judge(outcome, mark)
        except (trial.Hung, trial.Ended) as hung:
            outcome.hung = str(hung)
            outcome.seconds = time.monotonic() - began if began else 0.0
        finally:
            hand.release()
        return outcome

    def check(self) -> Report:
        """What the checker of scripts/chaos says of the journal, the ledger and the acks. When all have ended."""
        self._trial.watch.poll()
        work = self._work
        return check(work / "run", journal=work / "journal", acks=sorted(work.glob("acks-*.jsonl")))

    def _approach(self, point: Point, hand: Hand) -> None:
        """Hold the run at the point."""
        run = self._trial
        if point.name == "between updates":
            run.wait(lambda: run.served >= run.watch.version, "a version at both", recovery_s(run.config))
            return
        if point.name in JOINING:
            hand.aim(point.moment, HOLD_S)
        if point.name in (*JOINING, *NEW_EPOCH):
            before = run.servers[HELD].pid
            processes.send(before, SIGKILL)
            run.wait(lambda: run.servers[HELD].pid != before, f"another {HELD}", recovery_s(run.config))
        if point.name in NEW_EPOCH:
            run.watch.producers[HELD].live = -1
            run.wait(lambda: run.watch.producers[HELD].live >= 0, f"another {HELD} to serve", recovery_s(run.config))
        if point.name == "refill":
            hand.spoil()
            run.wait(lambda: hand.spoiled, "a spoiled update", recovery_s(run.config))
        if point.name not in JOINING:
            hand.aim(point.moment or point.name, HOLD_S)
        run.wait(lambda: hand.arrived, f"the point {point.name!r}", recovery_s(run.config))

    def _last(self, until: float, goal: int, outcome: Outcome, began: float) -> None:
        """Let a fault last, and note when the next version is served, should that be meanwhile."""
        while time.monotonic() < until:
            self._trial.tick()
            if not outcome.seconds and self._trial.served >= goal:
                outcome.seconds = time.monotonic() - began

    def _judge(self, outcome: Outcome, mark: dict[Path, int]) -> None:
        """Who was named, in which log."""
        logs, says = self._trial.logs, SAYS.get((outcome.role, outcome.fault), ())
        line = logs.first(says, mark)
        if says:
            outcome.culprit = f"{line.log}: {line.text}" if line is not None else ""
            outcome.wrong += [] if line is not None else ["no line names it"]
            return
        outcome.culprit = "changes nothing"
        outcome.wrong += [
            f"{line.log}: {line.text}" for line in logs.since(mark) if SOMETHING_CHANGED.search(line.text)
        ]


def lasts_s(role: str, fault: str, config: Config) -> float:
    """How long a fault lasts: longer than those who notice it wait."""
    patience = config.network.silent_after_s if role == "replay" else config.learner.batch_deadline_s
    return {"kill": 0.0, "stop": patience + 2.0, "cut": CUT_S, "slow": CUT_S}[fault]


def environment(pid: int) -> list[bytes]:
    """Variables of a process; none when it has ended."""
    try:
        return (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []
