"""`python -m scripts.chaos bus --points 20 --seed 1`: each role is hit at 20 points of a weight update.

receiver  processes of the bus alone, a gloo group of four: a publisher and three receivers
rank 1    the learner's second rank, beside the publishing rank 0, in a real training run
replay    in the same run

A row says how long it took until the next version was served by all that were not hit (by both rollout servers of a
run, the length of a stop included), which log line names the hit process, and whether all hold the same afterwards.
Every wait ends at a deadline that is made of the configuration's own; what exceeds it is `hung`. `unnamed` counts cases
in which no line names the hit process, or another one was named or removed. --list prints the points and faults.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.chaos.campaigns.bus_points import FAULTS, NAMED, POINTS, Outcome, totals
from scripts.chaos.campaigns.bus_receivers import ROLE as RECEIVER
from scripts.chaos.campaigns.bus_receivers import Receivers
from scripts.chaos.campaigns.bus_run import CONCERNED, ROLES, TrainingRun
from scripts.chaos.processes import may_cut
from scripts.chaos.report import State, say
from scripts.chaos.settings import make_data

QUICK = (("kill", "middle bucket"), ("slow", "applying"), ("cut", "between updates"), ("stop", "first bucket"))
LISTED = {point.name: point.what for point in POINTS} | {name: what for name, (what, _) in FAULTS.items()}
OPTIONS: dict[str, tuple[Any, str]] = {
    "points": (len(POINTS), "how many, drawn"),
    "roles": (",".join((RECEIVER, *ROLES)), "with commas between"),
    "faults": (",".join(FAULTS), "with commas between"),
    "only": ("", "points by name, with commas between"),
    "quick": (False, f"{len(QUICK)} cases of a receiver, less than a minute"),
    "list": (tuple(f"{name:15}  {what}" for name, what in LISTED.items()), "print the points and faults, and end"),
    "data": (Path("data/sort6"), "of make_sort6"),
}
Case = tuple[str, str, str]  # role, fault, point


def plan(args: argparse.Namespace) -> list[Case]:
    """The cases. Raises ValueError, with what is known, for a name that is not."""
    if args.quick:
        return [(RECEIVER, fault, point) for fault, point in QUICK]
    roles, faults = args.roles.split(","), args.faults.split(",")
    only = args.only.split(",") if args.only else list(NAMED)
    for given, known in ((roles, (RECEIVER, *ROLES)), (faults, tuple(FAULTS)), (only, tuple(NAMED))):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return [case for case in make_plan(roles, faults, args.points, args.seed) if case[2] in only]


def make_plan(roles: Sequence[str], faults: Sequence[str], points: int, seed: int) -> list[Case]:
    """The cases of each role, in the order of the points; the seed draws the points where these are not all."""
    rng, cases = random.Random(seed), []
    for role in roles:
        among = CONCERNED if role in ROLES else POINTS
        drawn = sorted(rng.sample(range(len(among)), min(points, len(among))))
        # a receiver can be stuck only at a gate; the processes of a run have none that would hold so long
        stuck = {point.name for point in POINTS if role == RECEIVER and point.moment}
        names = [among[i].name for i in drawn]
        cases += [(role, fault, name) for name in names for fault in faults if fault != "stuck" or name in stuck]
    return cases


def run(cases: list[Case], state: State, args: argparse.Namespace) -> None:
    if skipped := len(cases) - len(possible(cases)):
        print(f"{skipped} cuts are left out: the kernel does not let this process reach others' sockets")
    print(f"{'':11}{'role':8}  {'fault':5}  {'point':15}  {'s':>6}  {'digests':9}  which log says what", flush=True)
    done = {(case.role, case.fault, case.point) for case in outcomes(state)}
    left = [case for case in possible(cases) if case not in done]
    while left:
        role = left[0][0]
        work = state.fresh(f"{role.replace(' ', '-')}-{len(state.done):03d}")
        bench = Receivers(work) if role == RECEIVER else TrainingRun(work, make_data(args.data), role)
        with bench:
            hung = ""
            while left and left[0][0] == role and not hung:
                _, fault, point = left.pop(0)
                outcome = bench.case(fault, NAMED[point])
                state.add({"case": asdict(outcome)})
                say(outcome.row())
                hung = outcome.hung
        if isinstance(bench, TrainingRun):
            found = bench.run.check()
            state.add({"violations": [*found.lost, *found.trained_twice, *found.violations]})
            say(f"{role}: checker: {json.dumps(found.as_json())}")


def possible(cases: list[Case]) -> list[Case]:
    """Without those that the kernel does not allow: a cut reaches into another process's sockets."""
    return [case for case in cases if case[1] != "cut" or may_cut()]


def outcomes(state: State) -> list[Outcome]:
    return [Outcome(**part["case"]) for part in state.done if "case" in part]


def verdict(state: State, _hung: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    planned, found = plan(args), outcomes(state)
    violations = [text for part in state.done for text in part.get("violations", ())]
    wrong = [o.row() for o in found if o.hung or o.wrong or not o.digests_equal]
    return totals(found, len(planned) - len(possible(planned)), len(violations)), [*wrong, *violations]
