"""`python -m scripts.chaos [CAMPAIGN] ...`: seeded faults against real processes, and one line of JSON about them.

    chaos            faults against whole runs (taken where no campaign is named)
    resume           kill -9 of the learner and of replay, and equal digests afterwards
    bus              each role hit at 20 points of a weight update
    weights changes  updates sent as changes, with faults of messages and data between the ends
    weights flips    updates with flipped bits
    elastic          rollout servers that join and leave one run

CAMPAIGN --help lists the options. With --work, a campaign goes on where one with the same arguments was ended.
"""

import importlib
import sys
from collections.abc import Sequence

from scripts.chaos.report import drive

CAMPAIGNS = ("chaos", "resume", "bus", "weights changes", "weights flips", "elastic")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 only when all was in order."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]) or words in (["weights"], ["weights", "--help"]):
        print(__doc__)
        return 0
    name = next((name for name in CAMPAIGNS if words[: len(name.split())] == name.split()), "")
    module = importlib.import_module(f"scripts.chaos.campaigns.{(name or 'chaos').split()[-1]}")
    return drive(module, name or "chaos", words[len(name.split()) :])


if __name__ == "__main__":
    sys.exit(main())
