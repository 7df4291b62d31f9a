"""`python -m scripts.chaos [CAMPAIGN] ...`: seeded faults against real processes, and one line of JSON about them.

    chaos            faults against whole runs (taken where no campaign is named)
    resume           kill -9 of the learner and of replay, and equal digests afterwards
    bus              each role hit at 20 points of a weight update
    flips            flipped bits in weight updates
    elastic          rollout servers that join and leave one run

CAMPAIGN --help lists the options. With --work, a campaign goes on where one with the same arguments was ended.
"""

import sys
from collections.abc import Sequence
from importlib import import_module

from scripts.chaos.report import drive

CAMPAIGNS = ("chaos", "resume", "bus", "flips", "elastic")


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    named = words[0] if words and words[0] in CAMPAIGNS else ""
    campaign = import_module(f"scripts.chaos.campaigns.{named or CAMPAIGNS[0]}")
    return drive(campaign, named or CAMPAIGNS[0], words[bool(named) :])


if __name__ == "__main__":
    sys.exit(main())
