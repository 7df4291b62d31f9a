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

from scripts.chaos.report import drive


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    match words:
        case ["-h" | "--help"]:
            print(__doc__)
            return 0
        case ["resume", *rest]:
            from scripts.chaos.campaigns import resume as campaign
        case ["bus", *rest]:
            from scripts.chaos.campaigns import bus as campaign
        case ["flips", *rest]:
            from scripts.chaos.campaigns import flips as campaign
        case ["elastic", *rest]:
            from scripts.chaos.campaigns import elastic as campaign
        case ["chaos", *rest] | [*rest]:
            from scripts.chaos.campaigns import chaos as campaign
    return drive(campaign, " ".join(words[: len(words) - len(rest)]) or "chaos", rest)


if __name__ == "__main__":
    sys.exit(main())
