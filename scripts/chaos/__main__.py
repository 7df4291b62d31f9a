"""`python -m scripts.chaos --faults 200 --seed 1`: faults against real runs, and one line of JSON about them.

Real launchers, replay processes, learner ranks and rollout servers train a tiny model while processes are killed and
stopped, links are cut, slowed and frozen, messages change on the way, a disk fills up and clocks jump
(scripts/chaos/table.py). Afterwards a checker that shares no code with any of them reads what they left behind.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.chaos.campaign import Campaign, Totals
from scripts.chaos.plan import make_plan
from scripts.chaos.settings import ROOT
from scripts.chaos.table import FAULTS, POINTS, as_markdown


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 when anything was lost, doubled, hung or unnamed."""
    parser = argparse.ArgumentParser(prog="python -m scripts.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=20, help="faults in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--per-run", type=int, default=20, help="faults in one run (default: %(default)s)")
    parser.add_argument("--only", default="", help="faults with one of these words in their name: kill,cut")
    parser.add_argument("--work", type=Path, default=None, help="folder for runs; default: a temporary one")
    parser.add_argument("--data", type=Path, default=Path("data/sort6"), help="of make_sort6 (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the runs there also when all is in order")
    parser.add_argument("--table", action="store_true", help="print the table of docs/faults.md and end")
    args = parser.parse_args(argv)
    if args.table:
        print("\n".join(as_markdown()))
        return 0
    if args.faults < 1 or args.per_run < 1:
        parser.error("--faults and --per-run must be at least 1")
    try:
        plan = make_plan(args.seed, args.faults, args.per_run, args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.work is not None and args.work.exists() and any(args.work.iterdir()):
        parser.error(f"--work {args.work}: is not empty; take another folder")
    subprocess.run(
        [sys.executable, "-m", "learner.examples.sort6", "--out", str(args.data)], cwd=ROOT, check=True, timeout=300
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("chaos: SIGTERM received; everything that was started is ended"))
    work = args.work or Path(tempfile.mkdtemp(prefix="chaos-"))
    campaign = Campaign(work.resolve(), (ROOT / args.data).resolve(), args.seed)
    for number, planned in enumerate(plan, start=1):
        campaign.run(number, planned)
    report(campaign.totals)
    if campaign.totals.in_order and not args.keep and args.work is None:
        shutil.rmtree(work)
    return 0 if campaign.totals.in_order else 1


def report(totals: Totals) -> None:
    """Coverage, whatever is wrong, and the line of JSON."""
    width = max(len(fault.name) for fault in FAULTS)
    print(f"{'':{width}}  " + "  ".join(POINTS))
    for fault in FAULTS:
        cells = (f"{totals.coverage.get((fault.name, point), 0) or '-':>{len(point)}}" for point in POINTS)
        print(f"{fault.name:{width}}  " + "  ".join(cells))
    for wrong in (*totals.hung, *totals.ended, *totals.unnamed, *totals.report.as_json()["wrong"]):
        print(f"WRONG: {wrong}")
    print(json.dumps(totals.as_json()))


if __name__ == "__main__":
    sys.exit(main())
