"""`python -m scripts.bench pipeline|bus|replay|learner`: how fast it is, and what it costs.

    pipeline    how well rollouts, training and broadcast overlap; tables and JSON
    bus         a weight update, phase by phase, beside a bare broadcast of the same bytes
    replay      the data plane, in tokens per CPU-second of the replay process
    learner     one step of the learner, with and without what speeds it up

Each takes --help. The last line on standard output is one object of JSON.
"""

import sys


def main() -> int:
    """Entry point. Imports the chosen one alone: replay needs no torch."""
    match sys.argv[1:2]:
        case ["pipeline"]:
            from scripts.bench.pipeline import command
        case ["bus"]:
            from scripts.bench.bus import command
        case ["replay"]:
            from scripts.bench.replay import command
        case ["learner"]:
            from scripts.bench.learner import command
        case _:
            sys.stderr.write(f"{__doc__}\n")
            return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    return command(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
