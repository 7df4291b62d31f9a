"""torchrun that dies with its parent: `python -m slipstream.launch.torchrun ... -m learner.train`.

Where ranks fail it notes the cause in the file of SLIPSTREAM_EXIT_FILE: it alone has their exit statuses.
"""

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from slipstream.runtime import ending
from slipstream.runtime.lifeline import CANNOT_GO_ON, PARENT, die_with_parent

FORCED_AFTER_S = 29
"""torchrun ends the other ranks by SIGTERM, and by SIGKILL what is there after 30 s: its times are whole seconds."""


class Failure(Protocol):
    """What torchrun says of a rank that failed."""

    pid: int
    exitcode: int
    timestamp: int


def cause(failures: Mapping[int, Failure], folder: Path) -> ending.Ending:
    """The rank that a signal from outside ended, or else the first that stopped: others fail in consequence.

    Args:
        failures: by rank.
        folder: where ranks note how they ended.

    Returns:
        Its ending; the code is CANNOT_GO_ON where any rank refuses to go on.
    """
    said = ending.of_ranks(folder)
    refused = [one for one in said if one.code == CANNOT_GO_ON]
    began = min(one.timestamp for one in failures.values())
    for rank, one in sorted(failures.items(), key=lambda item: item[1].timestamp):
        if one.exitcode < 0 and one.exitcode != -signal.SIGTERM and one.timestamp - began < FORCED_AFTER_S:
            text = f"learner rank {rank} (pid {one.pid}) was {ending.how(one.exitcode)}"
            code = CANNOT_GO_ON if refused else one.exitcode
            return ending.Ending(code, text, pid=os.getpid(), symptom="closed", rank=rank)
    if known := ending.first(refused or said):
        return replace(known, pid=os.getpid())
    rank, one = min(failures.items(), key=lambda item: item[1].timestamp)
    text = f"learner rank {rank} (pid {one.pid}): {ending.how(one.exitcode)}"
    return ending.Ending(one.exitcode, text, pid=os.getpid(), rank=rank)


if __name__ == "__main__":
    # Before the long import of torch: a launcher that dies meanwhile must not leave this process behind.
    die_with_parent(int(os.environ.get(PARENT, os.getppid())))
    os.environ[PARENT] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    # torchrun would make a folder of its own for what ranks leave there when they fail, and never delete it
    with TemporaryDirectory(prefix="slipstream-torchrun-") as folder:
        try:
            main(["--log-dir", folder, *sys.argv[1:]])
        except ChildFailedError as failed:
            if path := os.environ.get(ending.PATH):
                ending.write_file(Path(path), cause(failed.failures, Path(path).parent))
            raise
