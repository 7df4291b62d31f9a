"""`python -m scripts.bus_corruption --updates 1000 --seed 1`: flipped bits in weight updates, and who serves them.

A real publisher sends versions of a tiny model over gloo to real subscribers, threads of this process. In one update of
--every, a bit of a random byte of a random tensor changes:

    wire    as the buckets arrive at one subscriber, or as they leave the publisher for all of them
    staged  in the staging buffer, after its digests were found right and before the engine copies from it
    live    in the engine's tensors, after they were loaded and before they are digested
    base    in the staging buffer, after the engine has copied from it; only with --delta, which builds on these bytes:
            it shows in the next version, in the staged bytes where its element changes, else in the live weights

An observer that shares no code with the bus compares what an engine holds with copies of what was published, byte by
byte, in the moment in which the engine is told to serve. `found` counts flips that the bus's log names with version and
subscriber, `healed` those after which each subscriber serves that version, bit for bit.

What the bus cannot see is planted as well and counted apart: `at_rest`, bits of live weights that change after these
were proven. They are served until the next version overwrites them.

The last line is one object of JSON; the exit code is 0 only when all was found, all healed and none served.
"""

import argparse
import json
import sys
from collections.abc import Sequence

import torch

from scripts.bus_corruption.bench import Bench


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 unless all was found and healed, and nothing corrupt served."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bus_corruption", description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=1000, help="versions to publish (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="one flip in so many updates (default: %(default)s)")
    parser.add_argument("--receivers", type=int, default=2, help="subscribers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--delta", action="store_true", help="send changes only (weight_bus.delta)")
    args = parser.parse_args(argv)
    if min(args.updates, args.every, args.receivers) < 1:
        parser.error("--updates, --every and --receivers must be at least 1")
    torch.set_num_threads(1)
    with Bench(args.seed, receivers=args.receivers, delta=args.delta) as bench:
        counts = bench.run(args.updates, args.every)
    print(f"{'place':8} {'planted':>8} {'found':>6} {'healed':>7} {'harmless':>9}")
    for place in counts.planted:
        row = (counts.planted[place], counts.found[place], counts.healed[place], counts.harmless[place])
        print("{:8} {:>8} {:>6} {:>7} {:>9}".format(place, *row))
    for wrong in bench.observer.served_corrupt:
        print(f"WRONG: {wrong}")
    print(json.dumps(counts.as_json()))
    return 0 if counts.in_order else 1


if __name__ == "__main__":
    sys.exit(main())
