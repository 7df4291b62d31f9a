"""Command line of the checker."""

import argparse
import json
import sys
from pathlib import Path

from scripts.chaos.checker import check


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.chaos.checker", description="Check a run folder.")
    parser.add_argument("run", type=Path, help="folder of a run, such as runs/quickstart")
    parser.add_argument("--journal", type=Path, default=None, help="folder with every file of its journal")
    args = parser.parse_args()
    report = check(args.run, journal=args.journal)
    print(json.dumps(report.as_json()))
    return 0 if report.in_order else 1


if __name__ == "__main__":
    sys.exit(main())
