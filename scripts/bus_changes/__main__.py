"""`python -m scripts.bus_changes --versions 200 --seed 1`: updates sent as changes (weight_bus.delta), among faults.

A real publisher sends versions of a small policy, made by real AdamW steps, to two real subscribers over gloo. A proxy
reads the control plane between them and loses, repeats, delays and reorders messages of every kind in both directions;
the data plane of the subscribers gives changes that are stale, come again or are in disorder; and some changes name a
base that is not theirs. The learner goes on publishing. A witness compares what an engine is told to serve with copies
of what was published, byte by byte; at the end, with all faults gone, everybody must reach the newest version.

The last line is one object of JSON; the exit code is 0 only when all is in order.
"""

import argparse
import faulthandler
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.bus_changes.campaign import Campaign, say

STARTING_S, LIMIT_S = 120.0, 3.0
"""And for each version, before this process takes itself for one that hangs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 when anything is not in order."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bus_changes", description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=200, help="to publish (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--log", type=Path, default=None, help="file for what the bus logs")
    parser.add_argument("--link-mb-s", help="is now: python -m scripts.bench link --link-mb-s")
    args = parser.parse_args(argv)
    if args.link_mb_s is not None:
        parser.error(f"over a link: python -m scripts.bench link --link-mb-s {args.link_mb_s}")
    if args.log is not None:
        logging.basicConfig(filename=args.log, level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s")
    result = among_faults(args)
    say(json.dumps(result))
    return 0 if result["in_order"] else 1


def among_faults(args: argparse.Namespace) -> dict[str, Any]:
    """Updates among faults, in this process."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(STARTING_S + LIMIT_S * args.versions, exit=True)
    try:
        with Campaign(args.seed) as campaign:
            return campaign.run(args.versions)
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    sys.exit(main())
