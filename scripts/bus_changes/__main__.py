"""`python -m scripts.bus_changes --versions 200 --seed 1`: updates sent as changes (weight_bus.delta), among faults.

A real publisher sends versions of a small policy, made by real AdamW steps, to two real subscribers over gloo. A proxy
reads the control plane between them and loses, repeats, delays and reorders messages of every kind in both directions;
the data plane of the subscribers gives changes that are stale, come again or are in disorder; and some changes name a
base that is not theirs. The learner goes on publishing. A witness compares what an engine is told to serve with copies
of what was published, byte by byte; at the end, with all faults gone, everybody must reach the newest version.

`--link-mb-s 100`: the time of an update over a link of 100 MB/s between two network namespaces, whole and as changes.

The last line is one object of JSON; the exit code is 0 only when all is in order.
"""

import argparse
import faulthandler
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.bus_changes.campaign import Campaign, say
from scripts.bus_changes.link import MODELS, LinkFailed, measure
from scripts.bus_changes.namespaces import NoLink

STARTING_S, LIMIT_S = 120.0, 3.0
"""And for each version, before this process takes itself for one that hangs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 when anything is not in order, 2 when this machine cannot do it."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bus_changes", description=__doc__.splitlines()[0])
    parser.add_argument("--versions", type=int, default=None, help="to publish; default: 200, over a link 14")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--log", type=Path, default=None, help="file for what the bus logs (not with a link)")
    parser.add_argument("--link-mb-s", type=float, default=None, help="instead: speed of a link, 10^6 bytes a second")
    parser.add_argument("--model", choices=sorted(MODELS), default="85M", help="over a link (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=1e-6, help="of the AdamW steps, over a link (default: %(default)s)")
    half = max(1, (os.cpu_count() or 1) // 2)
    parser.add_argument("--threads", type=int, default=half, help="of each end of a link; default: half the cores")
    parser.add_argument("--zstd", action="store_true", help="over a link: once more with weight_bus.compression zstd")
    parser.add_argument("--at-most", type=float, default=0.3, help="share of the full update's time (default: 0.3)")
    args = parser.parse_args(argv)
    if args.log is not None:
        logging.basicConfig(filename=args.log, level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s")
    result = among_faults(args) if args.link_mb_s is None else over_a_link(args)
    if result is None:
        return 2
    say(json.dumps(result))
    return 0 if result["in_order"] else 1


def among_faults(args: argparse.Namespace) -> dict[str, Any]:
    """Updates among faults, in this process."""
    versions = args.versions or 200
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(STARTING_S + LIMIT_S * versions, exit=True)
    try:
        with Campaign(args.seed) as campaign:
            return campaign.run(versions)
    finally:
        faulthandler.cancel_dump_traceback_later()


def over_a_link(args: argparse.Namespace) -> dict[str, Any] | None:
    """Updates over a slow link; None when that cannot be had or has failed."""
    # as Ctrl-C: what was made goes away on the way out
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        result = measure(
            args.link_mb_s,
            model=args.model,
            versions=args.versions or 14,
            seed=args.seed,
            lr=args.lr,
            threads=args.threads,
            zstd=args.zstd,
        )
    except (NoLink, LinkFailed) as error:
        sys.stderr.write(f"bus_changes: {error}\n")
        return None
    return {**result, "in_order": result["delta_over_full"] <= args.at_most}


if __name__ == "__main__":
    sys.exit(main())
