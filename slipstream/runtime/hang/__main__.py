"""`python -m slipstream.runtime.hang RUN_DIR`: a hang report of a run before any deadline, on this host."""

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.runtime.hang import registry, report
from slipstream.runtime.hang.registry import RegisteredProcess
from slipstream.runtime.program import program


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file, and print its name and its suspects."""
    parser = argparse.ArgumentParser(prog=program("slipstream.runtime.hang"), description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run, such as runs/quickstart")
    run_dir = parser.parse_args(argv).run_dir
    there = registry.members(run_dir)
    if not there:
        sys.stderr.write(f"{run_dir}: no process of a run is noted there; name the folder of a run that was started\n")
        return 2
    knows = next((member for member in there if member.replay is not None and member.is_here()), None)
    by = RegisteredProcess(
        name="python -m slipstream.runtime.hang",
        pid=os.getpid(),
        host=socket.gethostname(),
        started=0,
        replay=knows.replay if knows is not None else None,
        keys=knows.keys if knows is not None else None,
    )
    wait = report.Wait(waiter=by.name, what="this report", owed_by=(), waited_s=0.0, key="asked for by hand")
    path = run_dir / f"hang-asked-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.txt"
    try:
        suspects = report.write(path, wait, by, None)
    except OSError as error:
        sys.stderr.write(f"{path} cannot be written: {error.strerror}; run this as the run's user, or free the disk\n")
        return 2
    sys.stdout.write("\n".join([str(path), *(suspects or ["no suspect; read the stacks"])]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
