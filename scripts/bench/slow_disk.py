"""`python -m scripts.bench.slow_disk MS ...`: replay on a disk whose every sync takes so much longer, as over NFS.

It does so in every second PHASE_S, so that both are measured under what the machine does meanwhile.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from replay.main import main

PHASE_S = 3.0


def is_slow(moment: float) -> bool:
    """Whether the disk is slow at a reading of time.monotonic(), which all processes of a machine share."""
    return int(moment / PHASE_S) % 2 == 1


def slow_down(seconds: float) -> None:
    """Every sync of this process takes so much longer from now on, in its phases."""

    def slow(sync: Callable[[Any], None]) -> Any:
        def call(file: Any) -> None:
            if is_slow(time.monotonic()):
                time.sleep(seconds)
            sync(file)

        return call

    os.fsync, os.fdatasync = slow(os.fsync), slow(os.fdatasync)


if __name__ == "__main__":
    slow_down(float(sys.argv.pop(1)) / 1000)
    sys.exit(main())
