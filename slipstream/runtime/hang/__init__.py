"""Hang reports: what stood still, where, and who owed what to whom, in one file of the run folder.

    registry    each process notes itself at its start, and answers a signal with its stacks
    stacks      asks all processes of this host for their stacks
    report      the file; `expired` is called where a deadline has passed, and nothing happens before
    __main__    `python -m slipstream.runtime.hang RUN_DIR`: the same at any time

Each host writes of its own processes: the control channel carries no stacks, and a process that stands still would not
read the request. A report lists what runs on other hosts, and the command to run there.
"""

from slipstream.runtime.hang.registry import begin, serves
from slipstream.runtime.hang.report import expired

__all__ = ["begin", "expired", "serves"]
