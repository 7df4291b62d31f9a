"""`python -m scripts.chaos bus --points 20 --seed 1`: each role is hit at 20 points of a weight update.

A real training run is held at a point of the rollout server rollout-a, or before the gather of rank 0, while a process
is hit: rollout-a itself (a receiver), rank 1 beside the publishing rank 0, or replay. Rank 1 and replay take no part in
an update beyond the gather, but a fault takes the publisher, the leases or the batches with them.

A row says how long it took until the next version was served by all that were not hit, which log line names the hit
process, and whether all held the same afterwards. What exceeds its deadline, which is made of the configuration's own,
is `hung`. `unnamed` counts cases in which no line names the hit process, or another one was named or removed.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scripts.chaos import processes
from scripts.chaos.cluster import SERVERS, Cluster, Variant, make_data, recovery_s
from scripts.chaos.faults import HOLD_S, LEARNER_DIED, REPLAY_DIED
from scripts.chaos.polling import Ended, Hung, JsonLines
from scripts.chaos.report import State, say
from scripts.chaos.watch import SPOIL, Gate

POINTS = {
    "before Join": "a receiver is about to send Join",
    "joining": "it has sent Join and has no answer",
    "Welcome": "it has the answer and no part in an epoch",
    "late join": "it is being filled with the last version, the others serve that",
    "gathering": "the next version is being put together on rank 0",
    "Epoch": "it is invited into the next epoch and has not answered",
    "EpochReady": "it has answered, others may not have",
    "Begin": "Begin has come, no group is there",
    "forming": "its address is with the others, and it connects to none of them",
    "first bucket": "the group is there, nothing has been sent",
    "middle bucket": "half of the buckets have come",
    "last bucket": "all but one have come",
    "verifying": "all have come and are to be digested",
    "Staged": "it has sent that its bytes are proven",
    "Commit": "Commit has come, the engine is untouched",
    "applying": "half of the tensors are in the engine",
    "proving": "all are in the engine, which does not serve them yet",
    "Applied": "it has sent what the engine holds",
    "between updates": "the last version is served everywhere, nothing is under way",
    "refill": "bytes were corrupt, the version is being sent again",
}
MOMENTS = {"joining": "Join", "late join": "middle bucket", "refill": "middle bucket"}
"""Moments of scripts/chaos/probe.py at which a process is held; the others have the names of their points."""
JOINING = ("before Join", "joining", "Welcome", "late join")  # points that a receiver passes once in its life
UNKNOWN = JOINING[:2]  # where the bus need not know it yet, and replay's line names it
NEW_EPOCH = ("Epoch", "EpochReady", "forming")  # points that an update has only where the members have changed
AT_NO_GATE_OF_A_RECEIVER = ("gathering", "between updates")
FAULTS: dict[str, tuple[str, Callable[[int], AbstractContextManager[Any]]]] = {
    "kill": ("SIGKILL", processes.killed),
    "stop": ("SIGSTOP for longer than every deadline of the others, then SIGCONT", processes.stopped),
    "cut": ("its TCP connections are closed, and new ones at once, for four seconds", processes.cut_off),
    "slow": ("SIGSTOP and SIGCONT in turns, two thirds of the time stopped", processes.slowed),
    "stuck": ("its receiving thread waits for longer than weight_bus.deadline_s, heartbeats go on", nullcontext),
}
"""By name: in words, and a context for as long as the fault lasts. `slow` must change nothing: no peer may take it for
a failure. `stuck` is done by a gate."""
RECEIVER, RANK, REPLAY = ROLES = ("receiver", "rank 1", "replay")
HELD, OTHER = SERVERS
QUICK = ((RECEIVER, "kill", "middle bucket"), (RECEIVER, "slow", "applying"))
VARIANT = Variant(
    "lag 1, two ranks",
    (
        "replay.async_lag=1",
        "placement.split=2:2",
        "weight_bus.bucket_bytes=65536",
        "learner.batch_deadline_s=20",
        "learner.collective_deadline_s=20",
    ),
)
TOTAL_STEPS = 120_000  # more than any campaign takes: the run is ended from outside
PACE_S, CUT_S = 0.02, 4.0
GO_ON = 2  # versions above the last committed one; the first of them may be under way already, with a formed batch
LOST_RANK = r"lost 'learner-1'.*\[(closed|silent)\]"
LOST_RECEIVER = rf"weight bus: .*'{HELD}' \(pid {{pid}}\b.*\[(closed|silent|slow)\]"
SAYS: dict[str, dict[str, tuple[str, ...]]] = {
    RECEIVER: {fault: (LOST_RECEIVER,) for fault in ("kill", "stop", "cut", "stuck")},
    RANK: {
        "kill": (LEARNER_DIED.replace(r"rank \d+", "rank 1"),),
        "stop": (r"other ranks have no part yet\) \[slow\]", LOST_RANK),
        "cut": (LOST_RANK,),
    },
    REPLAY: {
        "kill": (REPLAY_DIED,),
        "stop": (r"(waited|waits).*replay.*\[silent\]",),
        "cut": (r"replay: lost '[\w-]+'.*\[closed\]",),  # a replay that is cut off says that all others are gone
    },
}
"""What some log must say of the hit process, by role and fault; `slow` must change nothing."""
SOMETHING_CHANGED = re.compile(r"replay: lost '|breaks off|the learner stopped|replay .* died|; removed")
OTHER_NAMED = re.compile(rf"replay: lost '(?!{HELD})|'{OTHER}' [^']*; removed|the learner stopped|replay .* died")

LISTED = POINTS | {name: what for name, (what, _) in FAULTS.items()}
OPTIONS: dict[str, tuple[Any, str]] = {
    "points": (len(POINTS), "how many, drawn"),
    "roles": (",".join(ROLES), "with commas between"),
    "faults": (",".join(FAULTS), "with commas between"),
    "only": ("", "points by name, with commas between"),
    "quick": (False, f"{len(QUICK)} cases of a receiver, about a minute"),
    "list": (tuple(f"{name:15}  {what}" for name, what in LISTED.items()), "print the points and faults, and end"),
    "data": (Path("data/sort6"), "of make_sort6"),
}
Case = tuple[str, str, str]  # role, fault, point


def plan(args: argparse.Namespace) -> list[Case]:
    """The cases. Raises ValueError, with what is known, for a name that is not."""
    if args.quick:
        return list(QUICK)
    roles, faults = args.roles.split(","), args.faults.split(",")
    only = args.only.split(",") if args.only else list(POINTS)
    for given, known in ((roles, ROLES), (faults, FAULTS), (only, POINTS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return [case for case in make_plan(roles, faults, args.points, args.seed) if case[2] in only]


def make_plan(roles: Sequence[str], faults: Sequence[str], points: int, seed: int) -> list[Case]:
    """The cases of each role, in the order of the points; the seed draws the points where these are not all."""
    rng, names, cases = random.Random(seed), list(POINTS), []
    for role in roles:
        drawn = sorted(rng.sample(names, min(points, len(names))), key=names.index)
        # only a receiver can be stuck at a gate; the other processes have none that would hold so long
        stuck = [name for name in drawn if role == RECEIVER and name not in AT_NO_GATE_OF_A_RECEIVER]
        cases += [(role, fault, name) for name in drawn for fault in faults if fault != "stuck" or name in stuck]
    return cases


def run(cases: list[Case], state: State, args: argparse.Namespace) -> None:
    done = {(case.role, case.fault, case.point) for case in outcomes(state)}
    # a cut reaches into another process's sockets, which not every kernel allows
    left = [case for case in cases if case not in done and (case[1] != "cut" or processes.may_cut())]
    while left:
        role = left[0][0]
        with TrainingRun(state.fresh(f"{role.replace(' ', '-')}-{len(state.done):03d}"), role) as training:
            training.start_small(VARIANT, make_data(args.data), TOTAL_STEPS)
            hung = ""
            while left and left[0][0] == role and not hung:
                _, fault, point = left.pop(0)
                outcome = training.case(fault, point)
                state.add({"case": asdict(outcome)})
                say(outcome.row())
                hung = outcome.hung
        found = training.check()
        state.add({"violations": [*found.lost, *found.trained_twice, *found.violations]})
        say(f"{role}: checker: {json.dumps(found.as_json())}")


@dataclass(slots=True, kw_only=True)
class Outcome:
    role: str
    fault: str
    point: str
    seconds: float = 0.0  # from the fault until the next version was live wherever the fault did not hit
    culprit: str = ""  # the line of a log that names the hit process; "changes nothing" where none may
    digests_equal: bool = False  # afterwards, everywhere
    hung: str = ""  # which wait was not over at its deadline
    wrong: list[str] = field(default_factory=list)  # no line names the hit process, or another one was named or removed
    deadline_s: float = 0.0  # the length of any fault of the role, and what processes take to come back

    def row(self) -> str:
        state = "HUNG: " + self.hung if self.hung else "equal" if self.digests_equal else "DIFFERENT"
        words = "; ".join(f"WRONG: {wrong}" for wrong in self.wrong) or self.culprit
        return f"{self.role:8}  {self.fault:5}  {self.point:15}  {self.seconds:6.2f}  {state:9}  {words}"


class TrainingRun(Cluster):
    """One run, of which one role meets one case after the other."""

    def __init__(self, work: Path, role: str) -> None:
        super().__init__(work, pace=lambda: PACE_S)
        self.role = role
        self._mark: dict[Path, int] = {}
        self._goal = self._pid = 0
        self._began = 0.0  # monotonic time at which the fault met the process; 0 before

    def duration_s(self, fault: str) -> float:
        """How long a fault lasts: a stop goes on beyond each deadline that could notice it."""
        config = self.config
        patience = {RECEIVER: config.weight_bus.deadline_s, RANK: config.learner.batch_deadline_s}
        long_s = patience.get(self.role, config.network.silent_after_s) + 2.0
        return {"kill": 0.0, "stop": long_s, "stuck": long_s}.get(fault, CUT_S)

    def case(self, fault: str, point: str) -> Outcome:
        outcome = Outcome(role=self.role, fault=fault, point=point)
        outcome.deadline_s = max(map(self.duration_s, FAULTS)) + recovery_s(self.config)
        learner, held = Gate(self.work / "probes" / "learner"), self.watch.probes[HELD].gate
        gate = learner if point == "gathering" else held
        lasts, self._began = self.duration_s(fault), 0.0
        try:
            # what is stuck is held by its gate for as long as the fault lasts
            self._approach(gate, point, lasts if fault == "stuck" else HOLD_S)
            with FAULTS[fault][1](self._pid):
                self._began = time.monotonic()
                if fault != "stuck":
                    gate.release()
                self.rest(lasts)
            gate.release()
            self._recover(outcome)
            self._judge(outcome)
        except (Hung, Ended) as hung:
            outcome.hung, outcome.seconds = str(hung), time.monotonic() - self._began if self._began else 0.0
        finally:
            gate.release()
        return outcome

    def _approach(self, gate: Gate, point: str, hold_s: float) -> None:
        """See that all is well, and hold the run at the point."""
        limit, held, moment = recovery_s(self.config), self.watch.probes[HELD], MOMENTS.get(point, point)
        for server in SERVERS:
            self.wait_for_peers(server)
        if point in JOINING:
            gate.aim(moment, hold_s)
        if point in (*JOINING, *NEW_EPOCH):
            before = self.kill(HELD)
            self.wait(lambda: self.pids(HELD) not in ([], [before]), f"another {HELD}", limit)
        if point in NEW_EPOCH:
            held.live = -1
            self.wait(lambda: held.live >= 0, f"another {HELD} to serve", limit)
        if point == "refill":
            gate.aim(SPOIL, HOLD_S)  # held, so that what follows is aimed at before it comes
            self.wait(lambda: gate.arrived, "an update to spoil", limit)
        if point == "between updates":
            self.wait(lambda: self.watch.served >= self.history.version, "a version at both", limit)
        else:
            if point not in JOINING:
                gate.aim(moment, hold_s)
            self.wait(lambda: gate.arrived, f"the point {point!r}", limit)
        self._mark, self._goal = self.logs.mark(), self.history.high + GO_ON
        pids = self.pids(HELD if self.role == RECEIVER else self.role)
        if not pids:
            raise Ended(f"{self.role} is not there")
        self._pid = pids[0]

    def _recover(self, outcome: Outcome) -> None:
        left = self._began + outcome.deadline_s - time.monotonic()
        self.wait(lambda: self.watch.served >= self._goal, f"v{self._goal} at both rollout servers", left)
        is_hit = outcome.role == RECEIVER and outcome.fault != "slow"
        served = [self.watch.probes[name].first("live", self._goal) for name in ([OTHER] if is_hit else SERVERS)]
        outcome.seconds = max(live["at"] for live in served if live is not None) - self._began
        self.go_on()
        self.wait(lambda: self._newest_sync()["weight_sync/version"] >= self._goal, f"the row of v{self._goal}", left)

    def _judge(self, outcome: Outcome) -> None:
        """The hit process must be named and no other; nothing may have changed where the fault changes nothing."""
        outcome.digests_equal = self._newest_sync()["weight_sync/digests_equal"] is True
        says, others = SAYS[outcome.role].get(outcome.fault, ()), SOMETHING_CHANGED
        if says:
            if outcome.role == RECEIVER and outcome.point in UNKNOWN:
                says = (*says, rf"replay: lost '{HELD}'.*\[(closed|silent)\]")
            line = self.logs.first([pattern.replace("{pid}", str(self._pid)) for pattern in says], self._mark)
            if line is not None:
                outcome.culprit = f"{line.log}: {line.text}"
            elif outcome.fault != "stuck" or outcome.point not in UNKNOWN:  # its heartbeats to replay go on
                outcome.wrong.append("no line names it")
            if outcome.role != RECEIVER:  # without rank 1 or replay, others are lost with them
                return
            others = OTHER_NAMED
        changed = (line for line in self.logs.since(self._mark) if others.search(line.text))
        outcome.wrong += [f"{line.log}: {line.text}" for line in changed]
        outcome.culprit = outcome.culprit or "changes nothing"

    def _newest_sync(self) -> dict[str, Any]:
        """The last row of metrics that tells of a broadcast; steps that are repeated make none."""
        metrics = JsonLines.read(self.folder / "metrics.jsonl")  # whole: a resumed learner cuts it
        rows = (row for row in reversed(metrics) if row.get("weight_sync/version") is not None)
        return next(rows, {"weight_sync/version": -1})


def outcomes(state: State) -> list[Outcome]:
    return [Outcome(**part["case"]) for part in state.done if "case" in part]


def verdict(state: State, _hung: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    found = outcomes(state)
    skipped = 0 if processes.may_cut() else sum(fault == "cut" for _, fault, _ in plan(args))
    violations = [text for part in state.done for text in part.get("violations", ())]
    wrong = [o.row() for o in found if o.hung or o.wrong or not o.digests_equal]
    return totals(found, skipped, len(violations)), [*wrong, *violations]


def totals(found: Sequence[Outcome], skipped: int, violations: int) -> dict[str, Any]:
    def longest(of: Sequence[Outcome]) -> dict[str, Any]:
        seconds = round(max((o.seconds for o in of), default=0.0), 2)
        return {"cases": len(of), "longest_s": seconds, "deadline_s": max((o.deadline_s for o in of), default=0.0)}

    everything = longest(found)
    return {
        "cases": everything.pop("cases"),
        "hung": sum(bool(o.hung) for o in found),
        "digests_equal": all(o.digests_equal for o in found),
        "unnamed": sum(bool(o.wrong) for o in found),
        **everything,
        "roles": {role: longest([o for o in found if o.role == role]) for role in dict.fromkeys(o.role for o in found)},
        "skipped": skipped,
        "violations": violations,
    }
