"""`python -m scripts.chaos weights changes|flips ...`: weight updates among faults of messages, data and memory.

    changes --versions 200 --seed 1
        A real publisher sends versions of a small policy, made by real AdamW steps, as changes (weight_bus.delta) to
        two real subscribers over gloo. A proxy loses, repeats, delays and reorders messages of every kind in both
        directions; changes on the data plane are stale, come again or are in disorder; some name another base than
        theirs. The learner goes on publishing. With all faults gone, the newest version must be reached everywhere.

    flips --updates 1000 --seed 1 [--delta]
        In one update of --every, a bit of a random byte of a random tensor changes:
        wire    as the buckets arrive at one subscriber, or as they leave the publisher for all of them
        staged  in the staging buffer, after its digests were found right and before the engine copies from it
        live    in the engine's tensors, after they were loaded and before they are digested
        base    in the staging buffer, after the engine has copied from it; only with --delta, which builds on these
                bytes: it shows in the next version, in the staged bytes where its element changes, else in live weights
        `found` counts flips that the bus's log names with version and subscriber, `healed` those after which each
        subscriber serves that version, bit for bit. What the bus cannot see is counted apart: `at_rest`, bits of live
        weights that change after these were proven; they are served until the next version overwrites them.

An oracle that shares no code with the bus compares what an engine is to serve with copies of what was published, byte
by byte. The last line is one object of JSON; the exit code is 0 only when all is in order.
"""

import argparse
import faulthandler
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.chaos.campaigns.changes import Changes
from scripts.chaos.campaigns.flips import Flips
from scripts.chaos.campaigns.policy import Policy
from scripts.chaos.report import State, conclude

STARTING_S, PER_VERSION_S = 120.0, 3.0
"""Before this process takes itself for one that hangs."""


def main(argv: Sequence[str]) -> int:
    """Command line; exit code 1 when anything is not in order."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.chaos weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="what", required=True)
    of_changes = commands.add_parser("changes", help="updates sent as changes, among faults")
    of_changes.add_argument("--versions", type=int, default=200, help="to publish (default: %(default)s)")
    of_changes.add_argument("--log", type=Path, default=None, help="file for what the bus logs")
    of_flips = commands.add_parser("flips", help="flipped bits")
    of_flips.add_argument("--updates", type=int, default=1000, help="versions to publish (default: %(default)s)")
    of_flips.add_argument("--every", type=int, default=50, help="one flip in so many updates (default: %(default)s)")
    of_flips.add_argument("--receivers", type=int, default=2, help="subscribers (default: %(default)s)")
    of_flips.add_argument("--delta", action="store_true", help="send changes only (weight_bus.delta)")
    for one in (of_changes, of_flips):
        one.add_argument("--seed", type=int, default=1, help="default: %(default)s")
        one.add_argument("--work", type=Path, default=None, help="folder of the result; a kept one is printed")
    args = parser.parse_args(argv)
    if min(value for name, value in vars(args).items() if name in ("versions", "updates", "every", "receivers")) < 1:
        parser.error("--versions, --updates, --every and --receivers must be at least 1")
    arguments = {name: value for name, value in vars(args).items() if name not in ("work", "log")}
    try:
        state = State(args.work, "weights", arguments)
    except ValueError as error:
        parser.error(str(error))
    if not state.done:
        torch.set_num_threads(1)
        limit_s = STARTING_S + PER_VERSION_S * (args.versions if args.what == "changes" else args.updates)
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)
        try:
            state.add(changes(args) if args.what == "changes" else flips(args))
        finally:
            faulthandler.cancel_dump_traceback_later()
    part = state.done[0]
    code = conclude(part["result"], part["wrong"], in_order=part["in_order"])
    if code == 0:
        state.remove()
    return code


def changes(args: argparse.Namespace) -> dict[str, object]:
    """Updates as changes, in this process."""
    if args.log is not None:
        logging.basicConfig(filename=args.log, level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s")
    with Changes(args.seed, Policy(args.seed)) as campaign:
        result, wrong = campaign.run(args.versions)
    return {"result": result, "wrong": wrong, "in_order": result["in_order"]}


def flips(args: argparse.Namespace) -> dict[str, object]:
    """Flipped bits, in this process."""
    with Flips(args.seed, receivers=args.receivers, delta=args.delta) as campaign:
        result = campaign.run(args.updates, args.every)
    counts = campaign.counts
    print(f"{'place':8} {'planted':>8} {'found':>6} {'healed':>7} {'harmless':>9}")
    for place in counts["planted"]:
        row = (counts[what][place] for what in ("planted", "found", "healed", "harmless"))
        print("{:8} {:>8} {:>6} {:>7} {:>9}".format(place, *row))
    wrong = [*campaign.wrong, *campaign.bus.oracle.wrong]
    return {"result": result, "wrong": wrong, "in_order": campaign.is_in_order}
