"""`python -m scripts.chaos elastic --seed 1`: one training run on a CPU with 1, then 4, then 2 rollout servers.

The quick start, by the documented commands. Three rollout servers join while it trains: one as it comes, one in the
middle of a weight update, one while the next update is far. Later one leaves by SIGTERM and one by SIGKILL, both while
they hold leases. Afterwards a judge reads what they left behind.
"""

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals
from typing import Any

from scripts.chaos.campaigns.elastic_judge import FAR, FIRST, MID_UPDATE, Facts, Judge
from scripts.chaos.cluster import LAUNCHER, Cluster, make_data, run_settings
from scripts.chaos.report import State, say
from scripts.chaos.watch import Gate

OPTIONS: dict[str, tuple[Any, str]] = {
    "short": (False, "1, then 2, then 1 rollout server, without evaluations"),
    "data": (None, "of make_sort6 (default: data/sort6-seed<seed>)"),
}
MID_UPDATE_HOLD_S = 2.0  # longest that a broadcast is held for a join; below weight_bus.collective_timeout_s
START_S, STEP_S, END_S = 90.0, 60.0, 180.0  # for a process, for what the next few steps bring, for the end of the run
JOINING_S, LEAVING_S, TOO_SOON_S = 1.5, 1.2, 10.0
"""How long one server is busy with a step's rewards: while others start, while servers leave, and past LATEST."""
STANDSTILL_S = 1.0  # reward of one answer while a server joins far from the next update, or leaves
CAUGHT_S = 0.2  # leases that have lasted so long since will last; a quick reward may have been on its way
QUIET_S = 2.0  # without a new version before a server joins far from one, and after it is served
LATEST = 0.75  # share of all steps at which the last departure is over; the run is slowed down where it would be later


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run. Example: FULL goes from 1 to 4 to 2 rollout servers."""

    steps: int
    joins: dict[str, str]  # how each late rollout server joins
    leaves: dict[str, Signals]  # how a rollout server leaves, while it holds leases
    alone: int  # steps with the first server only
    between: int  # steps with all of them, after each has had a group trained; and after each departure
    samples_per_step: int
    settings: tuple[str, ...] = ()  # what differs from the quick start
    target: float | None = None  # sampled accuracy, mean of the last three evaluations, where there are any


FULL = Plan(
    steps=80,
    joins={"late-1": "as it comes", "late-2": MID_UPDATE, "late-3": FAR},
    leaves={"late-1": SIGTERM, "late-2": SIGKILL},
    alone=4,
    between=6,
    samples_per_step=512,
    target=0.9,
)
LITTLE = "rollout.groups_per_step=16 evaluation.every_steps=0 checkpoint.every_steps=0 placement.split=1:1"
SHORT = Plan(
    steps=30,
    joins={"late-1": MID_UPDATE},
    leaves={"late-1": SIGKILL},
    alone=2,
    between=2,
    samples_per_step=128,
    settings=tuple(LITTLE.split()),
)


def plan(args: argparse.Namespace) -> Plan:
    return SHORT if args.short else FULL


def run(planned: Plan, state: State, args: argparse.Namespace) -> None:
    if not state.done:
        data = make_data(args.data or Path(f"data/sort6-seed{args.seed}"), seed=args.seed)
        with ElasticRun(planned, state.fresh("cluster")) as played:
            state.add(asdict(played.play(data, args.seed)))


def verdict(state: State, hung: str, _args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    if not state.done:
        return {"ended_early": hung}, []
    return Judge(state.work / "cluster", Facts(**state.done[0])).verdict()


class ElasticRun(Cluster):
    """The run of a plan."""

    def __init__(self, planned: Plan, work: Path) -> None:
        super().__init__(work, pace=self._seconds_per_reward)
        self.plan, self.facts = planned, Facts(steps=planned.steps, target=planned.target)
        self.probes = self.watch.probes
        self._step_s = 0.0  # how long one server shall be busy with the rewards of a step; 0 is as quick as it gets

    def play(self, data: Path, seed: int) -> Facts:
        began, planned, facts = time.monotonic(), self.plan, self.facts
        # the checker tells the life of every group from the first record on
        more = (f"learner.total_steps={planned.steps}", "replay.journal_keep=all")
        command = ("bash", "scripts/start_learner.sh", "--async-lag", "1", "--seed", str(seed))
        self.launch([*run_settings(self.work, data), *planned.settings, *more], *command, PORT="0")
        self._add(FIRST, "bash", "scripts/start_rollout_nodes.sh")
        self._reach_step(planned.alone, START_S)
        facts.ranks.append(self.pids("learner"))
        self._set_step_s(JOINING_S)
        for name, how in planned.joins.items():
            if how in (MID_UPDATE, FAR):
                Gate(self.work / "probes" / name).aim("before Join", 2 * START_S)
            self._add(name)
        for name, how in planned.joins.items():
            self._join(name, how)
        self._set_step_s(0.0)
        names, trained = list(facts.started), self.history.trained
        self.wait(lambda: all(trained[name] for name in names), f"a trained group of each of {names}", 2 * STEP_S)
        self._reach_step(self.history.version + planned.between)
        for name, sig in planned.leaves.items():
            self._leave(name, sig)
        facts.ranks.append(self.pids("learner"))
        self._finish()
        facts.seconds = round(time.monotonic() - began, 1)
        return facts

    def _add(self, name: str, *command: str) -> None:
        self.serve(name, self.address, *command)
        self.facts.started[name] = time.monotonic()
        self._say(f"{name} started: {' '.join(command) or 'python -m rollout_server.main'}")

    def _join(self, name: str, how: str) -> None:
        probe, first = self.probes[name], self.probes[FIRST]
        self.facts.joins[name] = how
        if how in (MID_UPDATE, FAR):
            self.wait(lambda: probe.gate.arrived, f"{name!r} at the gate before its Join", START_S)
        if how == MID_UPDATE:
            first.gate.aim("middle bucket", MID_UPDATE_HOLD_S)
            self.wait(lambda: first.gate.arrived, f"an update that is on its way to {FIRST!r}", STEP_S)
            probe.gate.release()
            self.wait(lambda: probe.first("welcome"), f"the publisher's Welcome to {name!r}", STEP_S)
            first.gate.release()
        elif how == FAR:
            self._set_step_s(STANDSTILL_S * self.plan.samples_per_step)
            self._stand_still()
            last, others = self.history.version, [p for p in self.probes.values() if p.live >= 0]
            self.wait(lambda: min(p.live for p in others) >= last, f"v{last} at all rollout servers", STEP_S)
            probe.gate.release()
        live = self.wait(lambda: probe.first("live"), f"the first version that {name!r} serves", START_S)
        asked = probe.first("join")
        assert asked is not None and live is not None
        took = live["at"] - asked["at"]
        self._say(f"{name} joined {how}: {took:.2f} s from its Join to serving v{live['version']}")
        if how == FAR:
            self._stand_still()
        self._set_step_s(JOINING_S)

    def _leave(self, name: str, sig: Signals) -> None:
        """End a server while it holds leases, and go on without it."""
        started, facts, history = self.started[name], self.facts, self.history
        self._catch_at_work(name)
        started.may_end = True
        started.process.send_signal(sig)
        left_at = time.monotonic()
        facts.leaves[name], facts.leases_left[name] = sig.name, history.held_by(name)
        self.wait(lambda: started.process.poll() is not None, f"the end of {name!r} after {sig.name}", STEP_S)
        self.wait(lambda: not history.held_by(name), f"that no lease is left with {name!r}", STEP_S)
        self._say(f"{name} left by {sig.name}; its leases moved in {time.monotonic() - left_at:.2f} s")
        self._set_step_s(0.0)
        self._reach_step(history.version + self.plan.between)

    def _catch_at_work(self, name: str) -> None:
        """Wait until a server holds leases that it cannot finish at once."""
        until, caught = time.monotonic() + STEP_S, False
        while not caught:
            self._set_step_s(LEAVING_S)
            what = f"a lease of {name!r} that it works on"
            self.wait(lambda: self.history.held_by(name) > 0, what, until - time.monotonic())
            self._set_step_s(STANDSTILL_S * self.plan.samples_per_step)
            self.rest(CAUGHT_S)
            caught = self.history.held_by(name) > 0

    def _finish(self) -> None:
        for name, started in self.started.items():  # the launcher first
            process, limit = started.process, END_S if name == LAUNCHER else STEP_S
            self.wait(lambda: process.poll() is not None, f"the end of {name!r}", limit)  # noqa: B023
            self.facts.exits["learner" if name == LAUNCHER else name] = process.returncode
        self.watch.poll()

    def _reach_step(self, goal: int, deadline_s: float = 0.0) -> None:
        limit = deadline_s or STEP_S + TOO_SOON_S * (goal - self.history.version)
        self.wait(lambda: self.history.version >= goal, f"step {goal}", limit)

    def _stand_still(self) -> None:
        seen = {self.history.version: time.monotonic()}

        def is_quiet() -> bool:
            return time.monotonic() - seen.setdefault(self.history.version, time.monotonic()) > QUIET_S

        self.wait(is_quiet, f"{QUIET_S:g} s without a step", STEP_S)

    def _set_step_s(self, seconds: float) -> None:
        self._step_s = seconds
        self.set_pace()

    def _seconds_per_reward(self) -> float:
        """The reward of each answer takes its share of a step."""
        late = self.history.version > LATEST * self.plan.steps and len(self.facts.ranks) < 2
        return (TOO_SOON_S if late else self._step_s) / self.plan.samples_per_step

    def _say(self, text: str) -> None:
        say(f"step {self.history.version:3d}  {text}")
