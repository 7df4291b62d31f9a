"""A rollout server as it is, with a gate in its subscriber: `python -m scripts.bus_faults.server EVENTS GATE ...`.

The rest of the arguments is the server's own; EVENTS is written as by scripts/chaos/producer.py. `gate_rank_0` puts a
gate before the gather of learner rank 0: while it is held there, the other ranks wait for it in the collective.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bus_faults.gates import Gate, install

SITE = '''"""Python runs this at the start of every process of the run."""
import os

if os.environ.get("RANK") == "0":
    from pathlib import Path

    from scripts.bus_faults.server import gate_rank_0

    gate_rank_0(Path({folder!r}))
'''


def gate_rank_0(folder: Path) -> None:
    """For sitecustomize, in learner rank 0."""
    from learner import sharding, weights

    gather, gate = sharding.gather_pieces, Gate(folder)

    def gathered(*arguments: Any) -> Iterator[Any]:
        gate.reach("gathering")
        yield from gather(*arguments)

    setattr(weights, "gather_pieces", gathered)  # noqa: B010 (not exported by name)


def main() -> int:
    """The rollout server."""
    gate = Path(sys.argv.pop(2))
    from rollout_server import main as rollout_main
    from scripts.chaos.producer import WitnessedDealer  # reads where to write from the first argument

    sys.argv = ["rollout_server", *sys.argv[2:]]
    setattr(rollout_main, "AsyncDealer", WitnessedDealer)  # noqa: B010
    install(Gate(gate))
    return rollout_main.main()


if __name__ == "__main__":
    sys.exit(main())
