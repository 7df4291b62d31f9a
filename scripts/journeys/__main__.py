"""`python -m scripts.journeys first-ten-minutes|my-run-hangs|my-reward-collapsed`: does what a user does, and times it.

Each command is printed as it is typed, with the lines of its output that matter and its seconds. The last line is JSON;
the exit code is 0 where all went as the pages say. CPU only. `--installed` takes the packages of this Python, otherwise
the first ten minutes install their own .venv, as a new user does.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from scripts.chaos.polling import Hung
from scripts.journeys import collapse, first_ten_minutes, hang
from scripts.journeys.narration import Failed, Journey


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        "python -m scripts.journeys", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ("first-ten-minutes", "my-run-hangs", "my-reward-collapsed")
    parser.add_argument("journey", choices=names)
    parser.add_argument("--installed", action="store_true", help="take this Python's packages, and install nothing")
    parser.add_argument("--folder", type=Path, help="where to; a temporary folder by default, deleted at the end")
    args = parser.parse_args(argv)
    travels: dict[str, Callable[[Journey], None]] = {
        "first-ten-minutes": partial(first_ten_minutes.travel, installed=args.installed),
        "my-run-hangs": hang.travel,
        "my-reward-collapsed": collapse.travel,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        journey = Journey(args.journey, folder, sys.executable)
        ok = False
        try:
            travels[args.journey](journey)
            ok = True
        except (Failed, Hung, subprocess.TimeoutExpired) as error:
            sys.stderr.write(f"journeys: {error}\n")
        finally:
            journey.close(ok=ok)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
