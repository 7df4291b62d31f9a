"""`python -m slipstream.view.trace runs/x`: merge what the processes of a run wrote about its profiled steps.

Writes trace/steps_A_B.json.gz into the run folder, for ui.perfetto.dev or chrome://tracing, and prints shares of time.
The launcher does it at the end of a run; do it earlier to look while the run goes on.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.runtime.program import program
from slipstream.view.trace.bubbles import summary
from slipstream.view.trace.merge import merge
from slipstream.view.trace.sources import TraceError


def main(argv: Sequence[str] | None = None) -> int:
    """Merge; exit code 2 where there is nothing to merge."""
    parser = argparse.ArgumentParser(prog=program("slipstream.view.trace"), description=__doc__)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="a run folder whose run had --profile")
    args = parser.parse_args(argv)
    try:
        path, processes, steps = merge(Path(args.run_dir))
    except (TraceError, OSError) as error:
        sys.stderr.write(f"slipstream: {error}\n")
        return 2
    sys.stdout.write(f"{summary(processes, steps)}\ntrace: {path} (open it in ui.perfetto.dev or chrome://tracing)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
