"""`python -m scripts.chaos.checker RUN`: one line of JSON about the journal and ledger of a run."""

import argparse
import json
import sys
from pathlib import Path

from scripts.chaos.checker import check

parser = argparse.ArgumentParser(prog="python -m scripts.chaos.checker", description=__doc__)
parser.add_argument("run", type=Path, help="folder of a run, such as runs/quickstart")
parser.add_argument("--journal", type=Path, help="folder with every file of its journal")
args = parser.parse_args()
report = check(args.run, journal=args.journal)
print(json.dumps(report.as_json()))
sys.exit(0 if report.in_order else 1)
