"""What a reward process may use, set before code of the user is loaded, and how going past it looks.

| key of `reward`  | limit of the kernel | what code of the user sees                                  |
|------------------|---------------------|-------------------------------------------------------------|
| `memory_bytes`   | RLIMIT_AS           | MemoryError; native code mostly aborts                      |
| `max_file_bytes` | RLIMIT_FSIZE        | OSError (EFBIG): Python ignores SIGXFSZ                     |
| `max_open_files` | RLIMIT_NOFILE       | OSError (EMFILE)                                            |

They hold for each process that the code starts as well, not for all of them together. RLIMIT_NPROC is left alone: the
kernel counts it over all processes of the user, so one grader's bomb would keep the engine from starting a thread.
"""

import ctypes
import errno
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
RESOURCES = {
    "memory_bytes": resource.RLIMIT_AS,
    "max_file_bytes": resource.RLIMIT_FSIZE,
    "max_open_files": resource.RLIMIT_NOFILE,
}
EXIT_CODES = {"memory_bytes": 161, "max_open_files": 162}
"""Of a process that ran into a limit on what it holds: what it holds may stay, so it ends and is started anew."""
ERRNOS = {errno.ENOMEM: "memory_bytes", errno.EFBIG: "max_file_bytes", errno.EMFILE: "max_open_files"}
MAX_CHAIN = 8
"""Exceptions that are looked at behind the one that was raised."""


class LimitReached(Exception):
    """Code of the user ran into a limit on what this process holds; `key` names it."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def control(option: int, value: int) -> None:
    """prctl(option, value).

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with(parent: int, how: signal.Signals) -> None:
    """Get a signal when the thread that started this process ends; leave at once when that has happened already."""
    control(PR_SET_PDEATHSIG, how)
    if os.getppid() != parent:
        os._exit(1)


def hold_back() -> None:
    """No memory images of a crash on disk, and no way to more rights: whatever is started stays ours to kill."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control(PR_SET_NO_NEW_PRIVS, 1)


def confine(limits: Mapping[str, int]) -> None:
    """Set the limits, for good: they cannot be raised again without privileges.

    Args:
        limits: value of each key of RESOURCES. Where the machine allows less, that holds, and stderr says so.
    """
    for key, kind in RESOURCES.items():
        hardest = resource.getrlimit(kind)[1]
        allowed = limits[key] if hardest == resource.RLIM_INFINITY else min(limits[key], hardest)
        resource.setrlimit(kind, (allowed, allowed))
        if allowed != limits[key]:
            sys.stderr.write(f"reward.{key} is {limits[key]}, but this machine allows {allowed}\n")


def value(key: str) -> int:
    """The limit that holds now."""
    return resource.getrlimit(RESOURCES[key])[0]


def reached(error: BaseException) -> str | None:
    """The key of the limit that an exception, or one that led to it, comes from; None when it comes from none."""
    for link in _chain(error):
        if isinstance(link, MemoryError):
            return "memory_bytes"
        if isinstance(link, OSError) and link.errno in ERRNOS:
            return ERRNOS[link.errno]
    return None


def leave(key: str) -> NoReturn:
    """End this process so that the pool knows which limit it ran into. Needs no memory."""
    os._exit(EXIT_CODES[key])


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    for _ in range(MAX_CHAIN):
        if link is None:
            return
        yield link
        link = link.__cause__ or link.__context__
