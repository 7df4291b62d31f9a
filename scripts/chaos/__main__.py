"""`python -m scripts.chaos [CAMPAIGN] ...`: seeded faults against real processes, and one line of JSON about them.

    chaos     faults against whole runs (taken where no campaign is named)
    resume    kill -9 of the learner and of replay, and equal digests afterwards
    bus       each role hit at 20 points of a weight update
    weights   updates sent whole and as changes, with faults of messages and flipped bits between the ends
    elastic   rollout servers that join and leave one run

CAMPAIGN --help lists the options. With --work, a campaign goes on where one with the same arguments was ended.
"""

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 only when all was in order."""
    words = list(sys.argv[1:] if argv is None else argv)
    match words[:1]:
        case ["resume"]:
            from scripts.chaos.campaigns import resume as campaign
        case ["bus"]:
            from scripts.chaos.campaigns import bus as campaign
        case ["weights"]:
            from scripts.chaos.campaigns import weights as campaign
        case ["elastic"]:
            from scripts.chaos.campaigns import elastic as campaign
        case _:
            from scripts.chaos.campaigns import chaos as campaign

            if words[:1] == ["-h"] or words[:1] == ["--help"]:
                print(__doc__)
            return campaign.main(words[1:] if words[:1] == ["chaos"] else words)
    return campaign.main(words[1:])


if __name__ == "__main__":
    sys.exit(main())
