"""`python -m scripts.chaos elastic --seed 1`: one training run on a CPU with 1, then 4, then 2 rollout servers.

The quick start, by the documented commands. Three rollout servers join while it trains: one as it comes, one in the
middle of a weight update, one while the next update is far. Later one leaves by SIGTERM and one by SIGKILL, both while
they hold leases. Afterwards a judge reads what they left behind.
"""

import argparse
import re
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from learner.record.summary import summarize
from scripts.chaos import checker
from scripts.chaos.cluster import Cluster, make_data
from scripts.chaos.polling import JsonLines
from scripts.chaos.report import State, say
from scripts.chaos.watch import Gate

OPTIONS: dict[str, tuple[Any, str]] = {
    "short": (False, "1, then 2, then 1 rollout server, without evaluations"),
    "data": (None, "of make_sort6 (default: data/sort6-seed<seed>)"),
}
FIRST = "first"  # the rollout server that is there from the beginning
AT_ANY_TIME, MID_UPDATE, FAR = "as it comes", "in the middle of an update", "far from the next one"
MID_UPDATE_HOLD_S = 2.0  # longest that a broadcast is held for a join; below weight_bus.collective_timeout_s
START_S, STEP_S = 90.0, 60.0  # for a process, for what the next few steps bring
SLOW_S, STANDSTILL_S = 1.5, 1.0
"""How long one server is busy with the rewards of a step while an update or a lease of another is waited for; and with
the reward of one answer while nothing shall move, as while a server starts."""
CAUGHT_S = 0.2  # leases that have lasted so long since will last; a quick reward may have been on its way
EXIT_CODES = {"": 0, "SIGTERM": 0, "SIGKILL": -9}


@dataclass(slots=True, kw_only=True)
class Facts:
    """One run: what is planned, and then what only the harness that started its processes knows."""

    steps: int
    between: int  # steps with the first server only; with all of them; and after each departure
    joins: dict[str, str]  # how each late rollout server joins
    leaves: dict[str, str]  # signal that ends a rollout server, while it holds leases
    settings: str = ""  # what differs from the quick start
    target: float | None = None  # sampled accuracy, mean of the last three evaluations, where there are any

    started: dict[str, float] = field(default_factory=dict)  # monotonic time of each rollout server's start
    leases_left: dict[str, int] = field(default_factory=dict)  # leases that a server held when it left
    exits: dict[str, int] = field(default_factory=dict)  # codes, the learner side's under `learner`
    ranks: list[list[int]] = field(default_factory=list)
    """Pids of the learner ranks before the first join and after the last departure."""
    seconds: float = 0.0


def plan(args: argparse.Namespace) -> Facts:
    if args.short:
        little = "rollout.groups_per_step=16 evaluation.every_steps=0 checkpoint.every_steps=0 placement.split=1:1"
        return Facts(steps=30, between=2, joins={"late-1": MID_UPDATE}, leaves={"late-1": "SIGKILL"}, settings=little)
    joins = {"late-1": AT_ANY_TIME, "late-2": MID_UPDATE, "late-3": FAR}
    return Facts(steps=80, between=5, joins=joins, leaves={"late-1": "SIGTERM", "late-2": "SIGKILL"}, target=0.9)


def run(planned: Facts, state: State, args: argparse.Namespace) -> None:
    if not state.done:
        data = make_data(args.data or Path(f"data/sort6-seed{args.seed}"), seed=args.seed)
        with ElasticRun(planned, state.fresh("cluster")) as played:
            played.play(data, args.seed)
            state.add(asdict(planned))


def verdict(state: State, hung: str, _args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    if not state.done:
        return {"ended_early": hung}, []
    return Judge(state.work / "cluster", Facts(**state.done[0])).verdict()


class ElasticRun(Cluster):
    """The run of a plan, which notes its facts there."""

    def __init__(self, facts: Facts, work: Path) -> None:
        super().__init__(work, pace=lambda: self._answer_s)
        self.facts, self.probes = facts, self.watch.probes
        self._answer_s = 0.0  # how long a reward takes; 0 is as quick as it gets

    def play(self, data: Path, seed: int) -> None:
        began, facts, trained = time.monotonic(), self.facts, self.history.trained
        # the checker tells the life of every group from the first record on
        more = (*facts.settings.split(), f"learner.total_steps={facts.steps}", "replay.journal_keep=all")
        command = ("bash", "scripts/start_learner.sh", "--async-lag", "1", "--seed", str(seed))
        self.launch([*self.settings(data), *more], *command, PORT="0")
        self._slow_s = SLOW_S / self.config.trajectories_per_step
        self._add(FIRST, "bash", "scripts/start_rollout_nodes.sh")
        self._make_steps()
        facts.ranks.append(self.pids("learner"))
        for name, how in facts.joins.items():
            self._join(name, how)
        self._answer_s = 0.0
        self.wait(lambda: all(trained[name] for name in facts.started), "a trained group of each server", 2 * STEP_S)
        self._make_steps()
        for name, sig in facts.leaves.items():
            self._leave(name, sig)
            self._make_steps()
        facts.ranks.append(self.pids("learner"))
        facts.exits = {"learner": self.finish(), **{name: self.end_of(name, STEP_S) for name in facts.started}}
        facts.seconds = round(time.monotonic() - began, 1)

    def _add(self, name: str, *command: str) -> None:
        self.serve(name, self.address, *command)
        self.facts.started[name] = time.monotonic()

    def _join(self, name: str, how: str) -> None:
        gate, first, history = Gate(self.work / "probes" / name), self.probes[FIRST], self.history
        if how != AT_ANY_TIME:
            gate.aim("before Join", 2 * START_S)
        self._answer_s = STANDSTILL_S
        self._add(name)
        probe = self.probes[name]
        if how != AT_ANY_TIME:
            self.wait(lambda: gate.arrived, f"{name!r} at the gate before its Join", START_S)
        if how == MID_UPDATE:
            first.gate.aim("middle bucket", MID_UPDATE_HOLD_S)
            self._answer_s = self._slow_s
            self.wait(lambda: first.gate.arrived, f"an update that is on its way to {FIRST!r}", STEP_S)
            gate.release()
            self.wait(lambda: probe.first("welcome"), f"the publisher's Welcome to {name!r}", STEP_S)
            first.gate.release()
            self._answer_s = STANDSTILL_S  # no other update comes before it serves
        elif how == FAR:
            others = [other for other in self.probes.values() if other.live >= 0]
            self.wait(lambda: min(other.live for other in others) >= history.version, "a version at all others", STEP_S)
            gate.release()
        self.wait(lambda: probe.first("live"), f"the first version that {name!r} serves", START_S)
        say(f"step {history.version:3d}  {name} joined {how} and serves v{probe.live}")

    def _leave(self, name: str, sig: str) -> None:
        """End a server while it holds leases that it cannot finish at once, and go on without it."""
        history, caught = self.history, False
        until = time.monotonic() + STEP_S
        while not caught:
            self._answer_s = self._slow_s
            self.wait(lambda: history.held_by(name), f"a lease that {name!r} works on", until - time.monotonic())
            self._answer_s = STANDSTILL_S
            self.rest(CAUGHT_S)
            caught = history.held_by(name) > 0
        self.started[name].send_signal(Signals[sig])
        self.facts.leases_left[name] = history.held_by(name)
        self.end_of(name, STEP_S)
        self.wait(lambda: not history.held_by(name), f"that no lease is left with {name!r}", STEP_S)
        say(f"step {history.version:3d}  {name} left by {sig}, and its leases have moved")
        self._answer_s = 0.0

    def _make_steps(self) -> None:
        goal = self.history.version + self.facts.between
        self.wait(lambda: self.history.version >= goal, f"step {goal}", START_S + STEP_S)


class Judge:
    """Judges one run, of which `work` has run/ and probes/, when all its processes have ended.

    The checker judges groups. Here: which server served what when, and on which proof. A version is proven on a server
    when the digest of what its engine held is the one that the learner has put into the journal for it.
    """

    def __init__(self, work: Path, facts: Facts) -> None:
        records = {name: work / "probes" / name / "events.jsonl" for name in facts.started}
        self.facts, self.run, self.wrong = facts, work / "run", list[str]()
        self.events = {name: JsonLines.read(path) for name, path in records.items()}
        self.report, self.history = checker.examine(self.run, acks=records.values())
        self.rows = JsonLines.read(self.run / "metrics.jsonl")
        self.steps = [row for row in self.rows if "training/lag_histogram" in row]
        self.unreached: defaultdict[str, list[str]] = defaultdict(list)  # by version, the servers that did not prove it
        log = (self.run / "logs" / "learner-0.log").read_text(encoding="utf-8", errors="replace")
        for version, name in re.findall(r"version (\d+) did not reach '([^']+)'", log):
            self.unreached[version].append(name)
        self.leases_before_proof = 0

    def verdict(self) -> tuple[dict[str, Any], list[str]]:
        facts, history, report = self.facts, self.history, self.report.as_json()
        self.wrong += report["wrong"]
        counts = [int(row["rollout/servers"]) for row in self.steps] or [0]
        servers = [counts[0], max(counts), counts[-1]]  # at the first step, at most, at the last
        self._judge_learner(servers)
        for name, events in self.events.items():
            self._judge_server(name)
            self._judge_proofs(name, events)
        joins = [self._judge_join(name, how) for name, how in facts.joins.items()]
        found, target = summarize(self.run, None), facts.target
        last = found["sampled_last3"]
        last = round(last, 4) if last is not None else None
        reached = target is None or (last is not None and last >= target)
        self._must(reached, f"reward: {last} at the end, the target is {target}")
        return {
            "steps": len({row["training/global_step"] for row in self.steps}),
            "servers": servers,
            "joins": joins,
            "leaves": [
                {"server": name, "signal": sig, "exit_code": facts.exits[name], "leases_moved": history.moved[name]}
                for name, sig in facts.leaves.items()
            ],
            "groups_by_server": {name: history.trained[name] for name in facts.started},
            **{key: report[key] for key in ("trained", "lost", "trained_twice", "violations")},
            "learner_restarts": history.incarnations - 1,
            "leases_before_proof": self.leases_before_proof,
            "reward_last": last,
            "target": target,
            "reached": reached,
            "max_lag": found["max_lag"],
            "seconds": facts.seconds,
            "wrong": len(self.wrong),
        }, self.wrong

    def _must(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.wrong.append(otherwise)

    def _judge_learner(self, servers: list[int]) -> None:
        facts, history, code, most = self.facts, self.history, self.facts.exits.get("learner"), len(self.facts.started)
        self._must(code == 0, f"the learner's launcher ended with exit code {code}")
        steps, last = [row["training/global_step"] for row in self.steps], history.version
        are_whole = steps == list(range(1, facts.steps + 1)) and last == facts.steps
        self._must(are_whole, f"{len(steps)} steps in metrics.jsonl and {last} in the journal, not 1 to {facts.steps}")
        starts = (history.incarnations, history.boots)
        self._must(starts == (1, 1), f"the learner started {starts[0]} times, replay {starts[1]} times")
        are_same = len(facts.ranks) == 2 and facts.ranks[0] and facts.ranks[0] == facts.ranks[1]
        self._must(are_same, f"the learner ranks are not the same processes before and after: {facts.ranks}")
        for version, names in self.unreached.items():
            stayed = set(names) - facts.leaves.keys()
            self._must(not stayed, f"version {version} was not proven on every server: {', '.join(names)}")
        expected = [1, most, most - len(facts.leaves)]
        self._must(servers == expected, f"{servers} rollout servers first, at most and last, not {expected}")
        members = max((int(row.get("weight_sync/members", 0)) for row in self.steps), default=0)
        self._must(members == most, f"at most {members} rollout servers were served by one broadcast, not {most}")

    def _judge_server(self, name: str) -> None:
        history, code, sig = self.history, self.facts.exits.get(name), self.facts.leaves.get(name, "")
        self._must(history.trained[name], f"{name}: none of its groups was trained")
        self._must(code == EXIT_CODES[sig], f"{name}: ended with exit code {code} after {sig or 'the run'}")
        if sig:
            moved = self.facts.leases_left[name] and history.moved[name]
            self._must(moved, f"{name}: held no lease when it left, so that nothing had to move")
            held = history.held_by(name)
            self._must(not held, f"{name}: {held} leases are still with it")

    def _judge_proofs(self, name: str, events: list[dict[str, Any]]) -> None:
        """What a server was given before a proof, by the order of what its probe recorded."""
        proven: set[int] = set()
        leases, live = 0, None
        for event in events:
            match event["event"]:
                case "proven":
                    version, digest = event["version"], event["digest"]
                    true = self.history.digests.get(version)
                    self._must(digest == true, f"{name}: its engine held {digest} as v{version}, the learner {true}")
                    proven |= {version} if digest == true else set()
                case "live":
                    live = event["version"]
                    self._must(live in proven, f"{name}: asked for leases with v{live}, not proven on it before")
                case "dark":
                    live = None
                case "lease":
                    leases += 1
                    self.leases_before_proof += live not in proven
                    group = event["group"]
                    self._must(live in proven, f"{name}: lease {group} came before any proven version was live")
        unproven = sorted(self.history.sampled[name] - proven)
        self._must(not unproven, f"{name}: tokens of versions {unproven} that were not proven on it")
        self._must(leases, f"{name}: its probe saw no lease")

    def _judge_join(self, name: str, how: str) -> dict[str, Any]:
        """How a late server was filled."""
        events = self.events[name]
        first = {event["event"]: event for event in reversed(events)}
        asked, live = first["join"]["at"], first["live"]
        later = next((e["at"] for e in events if e["event"] == "begin" and e["version"] > live["version"]), None)
        at_once = live["version"] == first["welcome"]["version"]
        if how == MID_UPDATE:
            before = [e["event"] for e in self.events[FIRST] if e["at"] < asked and e["event"] in ("begin", "proven")]
            self._must(before[-1:] == ["begin"], f"{name}: no update was on its way to {FIRST!r} when it joined")
        if how == FAR:
            is_before = at_once and later is not None and later > live["at"]
            self._must(is_before, f"{name}: was not filled before the next broadcast")
        return {
            "server": name,
            "how": how,
            "fill_seconds": round(live["at"] - asked, 3),
            "version": live["version"],
            "filled": "at once" if at_once else "by the next broadcast",
            "next_broadcast_seconds": round(later - asked, 3) if later is not None else None,
        }
