"""`python -m scripts.bench.slow_disk MS ...`: replay on a disk whose every sync takes so much longer, as over NFS."""

import os
import sys
import time
from collections.abc import Callable

from replay.main import main


def slow_down(seconds: float) -> None:
    """Every sync of this process takes so much longer from now on."""

    def slow(sync: Callable[[int], None]) -> Callable[[int], None]:
        def call(file: int) -> None:
            time.sleep(seconds)
            sync(file)

        return call

    os.fsync, os.fdatasync = slow(os.fsync), slow(os.fdatasync)


if __name__ == "__main__":
    slow_down(float(sys.argv.pop(1)) / 1000)
    sys.exit(main())
