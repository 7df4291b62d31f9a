"""`python -m scripts.bus_faults --points 20 --seed 1`: each role is hit at 20 points of a weight update.

    receiver  processes of the bus alone, a gloo group of four: a publisher and three receivers
    rank 1    the learner's second rank, beside the publishing rank 0, in a real training run
    replay    in the same run

    kill      SIGKILL
    stop      SIGSTOP for longer than everybody's patience, then SIGCONT
    cut       all its TCP connections are closed at both ends, and new ones at once, for longer than the bus's silence
    slow      SIGSTOP and SIGCONT in turns, two thirds of the time stopped: nobody may take it for a failure
    stuck     (receivers) its receiving thread stands still for longer than weight_bus.deadline_s; heartbeats go on

A row says how long it took until the next version was served by all who were not hit (by both rollout servers of a run,
the length of a stop included), which line of which log names who was hit, and whether everybody holds the same
afterwards. Every wait ends at a deadline that is made of the configuration's own; what exceeds it is `hung`. `unnamed`
counts cases in which no line names who was hit, or in which somebody who was not hit was named or removed.

The last line is one object of JSON; the exit code is 0 only when nothing hung, was unnamed or differed.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scripts.bus_faults.bus import CONFIG, BusBench, bound_s
from scripts.bus_faults.bus import ROLE as RECEIVER
from scripts.bus_faults.faults import FAULTS, Fault, may_cut
from scripts.bus_faults.points import HEADER, POINTS, Outcome, Point, chosen, totals
from scripts.bus_faults.run import CONCERNED, ROLES, RunBench
from scripts.chaos.settings import ROOT

QUICK = (
    ("kill", "middle bucket"),
    ("slow", "applying"),
    ("cut", "between updates"),
    ("stop", "first bucket"),
)
Case = tuple[str, Point]
"""Name of a fault, and where."""


class Campaign:
    """Prints each case as it ends, and keeps it."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.outcomes: list[Outcome] = []
        self.deadlines_s: dict[str, float] = {}
        self.violations: list[str] = []
        self._started = time.monotonic()
        self._benches = 0
        print(f"{'':9}{HEADER}", flush=True)

    def receivers(self, cases: Sequence[Case]) -> None:
        """Cases of the receivers."""
        self.deadlines_s[RECEIVER] = bound_s(CONFIG)
        left = list(cases)
        while left:
            with BusBench(self._folder()) as bench:
                self._run(left, bench.case)

    def run(self, role: str, cases: Sequence[Case], data: Path) -> None:
        """Cases of a role in a real run, and what the checker says of it."""
        left = list(cases)
        while left:
            bench = RunBench(self._folder(), data)
            with bench:
                self.deadlines_s[role] = bench.deadline_s(role)
                self._run(left, partial(bench.case, role))
            found = bench.check()
            self.violations += [*found.lost, *found.trained_twice, *found.violations]
            print(f"{'':9}{role}: checker: {json.dumps(found.as_json())}", flush=True)

    def as_json(self, skipped: int) -> dict[str, Any]:
        """The last line of the output."""
        return {**totals(self.outcomes, self.deadlines_s, skipped), "violations": len(self.violations)}

    def _run(self, left: list[Case], case: Callable[[Fault, Point], Outcome]) -> None:
        """All that is left, or up to a case that hung: the next one gets new processes."""
        while left:
            fault, point = left.pop(0)
            outcome = case(FAULTS[fault](), point)
            self.outcomes.append(outcome)
            print(f"{time.monotonic() - self._started:7.1f}  {outcome.row()}", flush=True)
            if outcome.hung:
                return

    def _folder(self) -> Path:
        self._benches += 1
        return self.work / f"{self._benches:02d}"


def plan(roles: Sequence[str], faults: Sequence[str], points: int, seed: int) -> dict[str, list[Case]]:
    """The cases of each role, in the order of the points; the seed draws the points where these are not all."""
    rng = random.Random(seed)
    among = {role: chosen(points, CONCERNED if role in ROLES else POINTS, rng) for role in roles}
    return {role: [(f, point) for point in among[role] for f in faults if possible(role, f, point)] for role in roles}


def possible(role: str, fault: str, point: Point) -> bool:
    """A receiver can be stuck only where there is a gate; the processes of a run have none that would hold so long."""
    return fault != "stuck" or (role == RECEIVER and bool(point.moment))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 when anything hung, was unnamed, or was not the same afterwards."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bus_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=len(POINTS), help="how many, drawn (default: all %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--roles", default=",".join((RECEIVER, *ROLES)), help="default: %(default)s")
    parser.add_argument("--faults", default=",".join(FAULTS), help="default: %(default)s")
    parser.add_argument("--only", default="", help="points by name, with commas between")
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} cases of a receiver, less than a minute")
    parser.add_argument("--list", action="store_true", help="print the points and faults, and end")
    parser.add_argument("--work", type=Path, default=None, help="folder for logs; default: a temporary one")
    parser.add_argument("--data", type=Path, default=Path("data/sort6"), help="of make_sort6 (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.list:
        print("\n".join(f"{point.name:15}  {point.what}" for point in POINTS))
        print("\n".join(f"{name:15}  {make().what}" for name, make in FAULTS.items()))
        return 0
    try:
        cases = cases_of(args)
    except ValueError as error:
        parser.error(str(error))
    skipped = 0
    if not may_cut():
        everything = sum(map(len, cases.values()))
        cases = {role: [case for case in mine if case[0] != "cut"] for role, mine in cases.items()}
        skipped = everything - sum(map(len, cases.values()))
        print(f"{skipped} cuts are left out: the kernel does not let this process reach the sockets of others")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("bus_faults: SIGTERM received; all that was started is ended"))
    work = args.work or Path(tempfile.mkdtemp(prefix="bus-faults-"))
    campaign = Campaign(work.resolve())
    for role, mine in cases.items():
        if role == RECEIVER:
            campaign.receivers(mine)
        elif mine:
            campaign.run(role, mine, make_data(args.data))
    result = campaign.as_json(skipped)
    for text in campaign.violations:
        print(f"VIOLATION: {text}")
    print(json.dumps(result))
    in_order = result["digests_equal"] and not (result["hung"] or result["unnamed"] or result["violations"])
    if in_order and args.work is None:
        shutil.rmtree(work)
    return 0 if in_order else 1


def cases_of(args: argparse.Namespace) -> dict[str, list[Case]]:
    """What the command line asks for. Raises ValueError, with what is known, for a name that is not."""
    named = {point.name: point for point in POINTS}
    if args.quick:
        return {RECEIVER: [(fault, named[point]) for fault, point in QUICK]}
    roles, faults = args.roles.split(","), args.faults.split(",")
    only = args.only.split(",") if args.only else list(named)
    for given, known in ((roles, (RECEIVER, *ROLES)), (faults, tuple(FAULTS)), (only, tuple(named))):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is none of {', '.join(known)}")
    planned = plan(roles, faults, args.points, args.seed)
    return {role: [case for case in mine if case[1].name in only] for role, mine in planned.items()}


def make_data(folder: Path) -> Path:
    """The quick start's model and prompts, made where they are missing."""
    command = [sys.executable, "-m", "learner.examples.sort6", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return (ROOT / folder).resolve()


if __name__ == "__main__":
    sys.exit(main())
