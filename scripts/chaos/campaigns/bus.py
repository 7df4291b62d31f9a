"""`python -m scripts.chaos bus --points 20 --seed 1`: each role is hit at 20 points of a weight update.

    receiver  processes of the bus alone, a gloo group of four: a publisher and three receivers
    rank 1    the learner's second rank, beside the publishing rank 0, in a real training run
    replay    in the same run

    kill      SIGKILL
    stop      SIGSTOP for longer than every deadline of the others, then SIGCONT
    cut       all its TCP connections are closed at both ends, and new ones at once, for longer than the bus's silence
    slow      SIGSTOP and SIGCONT in turns, two thirds of the time stopped: no peer may take it for a failure
    stuck     (receivers) its receiving thread stands still for longer than weight_bus.deadline_s; heartbeats go on

A row says how long it took until the next version was served by all that were not hit (by both rollout servers of a
run, the length of a stop included), which log line names the hit process, and whether all hold the same afterwards.
Every wait ends at a deadline that is made of the configuration's own; what exceeds it is `hung`. `unnamed` counts cases
in which no line names the hit process, or another one was named or removed.

The last line is one object of JSON; the exit code is 0 only when nothing hung, was unnamed or differed.
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from scripts.chaos.campaigns.bus_points import (
    FAULTS,
    HEADER,
    NAMED,
    POINTS,
    Outcome,
    Point,
    chosen,
    totals,
)
from scripts.chaos.campaigns.bus_receivers import ROLE as RECEIVER
from scripts.chaos.campaigns.bus_receivers import Receivers
from scripts.chaos.campaigns.bus_run import CONCERNED, ROLES, TrainingRun
from scripts.chaos.processes import may_cut
from scripts.chaos.report import State, conclude, end_on_sigterm, say
from scripts.chaos.settings import make_data

QUICK = (("kill", "middle bucket"), ("slow", "applying"), ("cut", "between updates"), ("stop", "first bucket"))
Case = tuple[str, str, str]
"""Role, fault, point."""


class Campaign:
    """Prints each case as it ends, and keeps it in the state."""

    def __init__(self, state: State, data: Path) -> None:
        self.state, self._data = state, data
        print(f"{'':11}{HEADER}", flush=True)

    @property
    def outcomes(self) -> list[Outcome]:
        """All cases so far."""
        return [Outcome(**part["case"]) for part in self.state.done if "case" in part]

    @property
    def violations(self) -> list[str]:
        """What the checker found in the runs."""
        return [text for part in self.state.done for text in part.get("violations", ())]

    def run(self, role: str, cases: Sequence[Case]) -> None:
        """The cases of a role; after one that hung the next gets new processes."""
        left = list(cases)
        while left:
            work = self.state.fresh(f"{role.replace(' ', '-')}-{len(self.state.done):03d}")
            if role == RECEIVER:
                receivers = Receivers(work)
                self._some(left, receivers, receivers.case)
                continue
            training = TrainingRun(work, make_data(self._data))
            self._some(left, training, partial(training.case, role))
            found = training.check()
            self.state.add({"violations": [*found.lost, *found.trained_twice, *found.violations]})
            say(f"{role}: checker: {json.dumps(found.as_json())}")

    def _some(
        self,
        left: list[Case],
        bench: AbstractContextManager[Any],
        run_case: Callable[[str, Point], Outcome],
    ) -> None:
        with bench:
            while left:
                _, fault, point = left.pop(0)
                outcome = run_case(fault, NAMED[point])
                self.state.add({"case": asdict(outcome)})
                say(outcome.row())
                if outcome.hung:
                    return


def make_plan(roles: Sequence[str], faults: Sequence[str], points: int, seed: int) -> list[Case]:
    """The cases of each role, in the order of the points; the seed draws the points where these are not all."""
    rng = random.Random(seed)
    among = {role: chosen(points, CONCERNED if role in ROLES else POINTS, rng) for role in roles}
    return [(role, f, p.name) for role in roles for p in among[role] for f in faults if is_possible(role, f, p)]


def is_possible(role: str, fault: str, point: Point) -> bool:
    """A receiver can be stuck only at a gate; the processes of a run have none that would hold so long."""
    return fault != "stuck" or (role == RECEIVER and bool(point.moment))


def cases_of(args: argparse.Namespace) -> list[Case]:
    """The cases of a command line. Raises ValueError, with what is known, for a name that is not."""
    if args.quick:
        return [(RECEIVER, fault, point) for fault, point in QUICK]
    roles, faults = args.roles.split(","), args.faults.split(",")
    only = args.only.split(",") if args.only else list(NAMED)
    for given, known in ((roles, (RECEIVER, *ROLES)), (faults, tuple(FAULTS)), (only, tuple(NAMED))):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return [case for case in make_plan(roles, faults, args.points, args.seed) if case[2] in only]


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    made = argparse.ArgumentParser(prog="python -m scripts.chaos bus", description=__doc__.splitlines()[0])
    made.add_argument("--points", type=int, default=len(POINTS), help="how many, drawn (default: all %(default)s)")
    made.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    made.add_argument("--roles", default=",".join((RECEIVER, *ROLES)), help="default: %(default)s")
    made.add_argument("--faults", default=",".join(FAULTS), help="default: %(default)s")
    made.add_argument("--only", default="", help="points by name, with commas between")
    made.add_argument("--quick", action="store_true", help=f"{len(QUICK)} cases of a receiver, less than a minute")
    made.add_argument("--list", action="store_true", help="print the points and faults, and end")
    made.add_argument("--work", type=Path, default=None, help="folder for logs, also to go on in; default: a new one")
    made.add_argument("--data", type=Path, default=Path("data/sort6"), help="of make_sort6 (default: %(default)s)")
    return made


def main(argv: Sequence[str]) -> int:
    """Command line; exit code 1 when anything hung, was unnamed, or was not the same afterwards."""
    args = parser().parse_args(argv)
    if args.list:
        print("\n".join(f"{point.name:15}  {point.what}" for point in POINTS))
        print("\n".join(f"{name:15}  {what}" for name, (what, _) in FAULTS.items()))
        return 0
    try:
        cases = cases_of(args)
        state = State(args.work, "bus", {"cases": [list(case) for case in cases]})
    except ValueError as error:
        parser().error(str(error))
    planned = len(cases)
    if not may_cut():
        cases = [case for case in cases if case[1] != "cut"]
        print(f"{planned - len(cases)} cuts are left out: the kernel does not let this process reach others' sockets")
    end_on_sigterm()
    campaign = Campaign(state, args.data)
    done = {(o.role, o.fault, o.point) for o in campaign.outcomes}
    for role in dict.fromkeys(case[0] for case in cases):
        campaign.run(role, [case for case in cases if case[0] == role and case not in done])
    violations = campaign.violations
    result = totals(campaign.outcomes, planned - len(cases), len(violations))
    wrong = bool(result["hung"] or result["unnamed"] or violations)
    code = conclude(result, violations, in_order=result["digests_equal"] and not wrong)
    if code == 0:
        state.remove()
    return code
