"""`python -m scripts.chaos [CAMPAIGN] ...`: seeded faults against real processes, and one line of JSON about them.

    chaos            faults against whole runs (taken where no campaign is named)
    resume           kill -9 of the learner and of replay, and equal digests afterwards
    bus              each role hit at 20 points of a weight update
    weights changes  updates sent as changes, with faults of messages and data between the ends
    weights flips    updates with flipped bits
    elastic          rollout servers that join and leave one run

CAMPAIGN --help lists the options. With --work, a campaign goes on where one with the same arguments was ended.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from scripts.chaos.report import drive

CAMPAIGNS = ("chaos", "resume", "bus", "weights changes", "weights flips", "elastic")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    given = next((name for name in CAMPAIGNS if words[: len(name.split())] == name.split()), "")
    if not given and words[:1] in (["-h"], ["--help"], ["weights"]):
        print(__doc__)
        return 0
    name = given or "chaos"
    return drive(import_module(f"scripts.chaos.campaigns.{name.split()[-1]}"), name, words[len(given.split()) :])


if __name__ == "__main__":
    sys.exit(main())
