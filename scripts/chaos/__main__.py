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

from scripts.chaos.campaigns import bus, chaos, elastic, flips, resume
from scripts.chaos.report import drive

CAMPAIGNS = {"chaos": chaos, "resume": resume, "bus": bus, "flips": flips, "elastic": elastic}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    is_named = bool(words) and words[0] in CAMPAIGNS
    name = words[0] if is_named else "chaos"
    return drive(CAMPAIGNS[name], name, words[is_named:])


if __name__ == "__main__":
    sys.exit(main())
