"""What a reward process may use: set before code of the user is loaded.

| key of `reward`  | limit of the kernel | what code of the user sees                                  |
|------------------|---------------------|-------------------------------------------------------------|
| `memory_bytes`   | RLIMIT_AS           | MemoryError; native code mostly aborts                      |
| `max_file_bytes` | RLIMIT_FSIZE        | OSError (EFBIG): Python ignores SIGXFSZ                     |
| `max_open_files` | RLIMIT_NOFILE       | OSError (EMFILE)                                            |

They hold for each process that the code starts as well, not for all of them together. RLIMIT_NPROC is left alone: the
kernel counts it over all processes of the user, so one grader's bomb would keep the engine from starting a thread.
"""

import errno
import os
import resource
import sys
from collections.abc import Mapping
from typing import NoReturn

from rollout_server.tasks.workers.supervisor import limit

RESOURCES = {
    "memory_bytes": resource.RLIMIT_AS,
    "max_file_bytes": resource.RLIMIT_FSIZE,
    "max_open_files": resource.RLIMIT_NOFILE,
}
EXIT_CODES = {"memory_bytes": 161, "max_open_files": 162}
"""Of a process that ran into a limit on what it holds: what it holds may stay, so it ends and is started anew."""
ERRNOS = {errno.ENOMEM: "memory_bytes", errno.EFBIG: "max_file_bytes", errno.EMFILE: "max_open_files"}
MAX_CHAIN = 8
"""Exceptions that are looked at, the one that was raised and those that led to it."""


def confine(limits: Mapping[str, int]) -> None:
    """Set these limits for good; where the machine allows less, that holds, and stderr says so."""
    for key, wanted in limits.items():
        if (allowed := limit(RESOURCES[key], wanted)) != wanted:
            sys.stderr.write(f"reward.{key} is {wanted}, but this machine allows {allowed}\n")


def exceeded(error: BaseException) -> str:
    """Names the limit behind an exception or one that led to it; empty without one.

    Ends this process where the limit is on what it holds: it might fail the next sample too.
    """
    link: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if isinstance(link, MemoryError):
            leave("memory_bytes")
        if isinstance(link, OSError) and link.errno in ERRNOS:
            key = ERRNOS[link.errno]
            if key in EXIT_CODES:
                leave(key)
            return f": more than reward.{key} = {resource.getrlimit(RESOURCES[key])[0]} allows"
        if link is not None:
            link = link.__cause__ or link.__context__
    return ""


def leave(key: str) -> NoReturn:
    """End this process with the exit code of a limit. Needs no memory."""
    os._exit(EXIT_CODES[key])
