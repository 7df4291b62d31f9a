"""`python -m scripts.bench pipeline|bus|replay|link`: how fast it is, and what it costs.

    pipeline    how well rollouts, training and broadcast overlap; tables and JSON
    bus         a weight update, phase by phase, beside a bare broadcast of the same bytes
    replay      the data plane, in tokens per CPU-second of the replay process
    link        a weight update over a slow link, whole and as changes

Each takes --help. The last line on standard output is one object of JSON.
"""

import sys
from typing import Any


def main() -> int:
    """Entry point."""
    chosen: Any  # imported when it is run: replay needs no torch
    match sys.argv[1:2]:
        case ["pipeline"]:
            from scripts.bench import pipeline as chosen
        case ["bus"]:
            from scripts.bench import bus as chosen
        case ["replay"]:
            from scripts.bench import replay as chosen
        case ["link"]:
            from scripts.bench import link as chosen
        case _:
            sys.stderr.write(f"{__doc__}\n")
            return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    return int(chosen.command(sys.argv[2:]))


if __name__ == "__main__":
    sys.exit(main())
