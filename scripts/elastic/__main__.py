"""`python -m scripts.elastic --seed 1`: one training run on a CPU with 1, then 4, then 2 rollout servers.

The quick start, started by the documented commands. Three rollout servers join while it trains: one as it comes, one in
the middle of a weight update, one while the next update is far. Later one leaves by SIGTERM and one by SIGKILL, both
while they hold leases. Afterwards a judge reads what they left behind; the last line is JSON.
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

from scripts.chaos.settings import ROOT
from scripts.elastic.judge import Judge, Verdict
from scripts.elastic.plan import FULL, SHORT
from scripts.elastic.run import ElasticRun, Facts, Missing


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 when anything is not in order."""
    parser = argparse.ArgumentParser(prog="python -m scripts.elastic", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="of the data, the model and the run (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="1, then 2, then 1 rollout server, without evaluations")
    parser.add_argument("--work", type=Path, default=None, help="folder for the run; default: a temporary one")
    parser.add_argument("--data", type=Path, default=None, help="of make_sort6 (default: data/sort6-seed<seed>)")
    parser.add_argument("--keep", action="store_true", help="leave the run there also when all is in order")
    parser.add_argument("--judge", type=Path, default=None, metavar="WORK", help="only judge an earlier run's folder")
    args = parser.parse_args(argv)
    if args.judge is not None:
        return report(Judge(args.judge, Facts.read(args.judge)).verdict())
    if args.work is not None and args.work.exists() and any(args.work.iterdir()):
        parser.error(f"--work {args.work}: is not empty; take another folder")
    data: Path = (args.data or ROOT / f"data/sort6-seed{args.seed}").resolve()
    command = [sys.executable, "-m", "learner.examples.sort6", "--out", str(data), "--seed", str(args.seed)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("elastic: SIGTERM received; all that was started is ended"))
    work: Path = (args.work or Path(tempfile.mkdtemp(prefix="elastic-"))).resolve()
    try:
        with ElasticRun(SHORT if args.short else FULL, work, data, args.seed) as run:
            facts = run.play()
    except Missing as missing:
        print(f"WRONG: {missing}; see {work}")
        print(json.dumps({"ended_early": str(missing)}))
        return 1
    facts.write(work)
    code = report(Judge(work, facts).verdict())
    if code == 0 and args.work is None and not args.keep:
        shutil.rmtree(work)
    else:
        sys.stderr.write(f"elastic: the run is in {work}\n")
    return code


def report(verdict: Verdict) -> int:
    """What is wrong, and the line of JSON."""
    for wrong in verdict.wrong:
        print(f"WRONG: {wrong}")
    print(json.dumps(verdict.result))
    return 1 if verdict.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
