"""Processes that end with their parent (Linux: PR_SET_PDEATHSIG), exit codes, and logs that all write alike."""

import ctypes
import logging
import os
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from configs.errors import coded
from slipstream.runtime.processes import of

PR_SET_PDEATHSIG = 1
PARENT = "SLIPSTREAM_PARENT_PID"
"""Environment variable that tells a learner rank who its parent is."""
CANNOT_START = 78
"""Exit code (EX_CONFIG of sysexits.h) of a process that refuses what it was given: starting it again is no use."""
START_REFUSED = 79
"""Exit code of a process whose engine refuses what it was given, as far as its words tell: twice in a row, it does."""
CANNOT_GO_ON = 2
"""Exit code of replay, of a learner rank and of a node that another start would refuse as well."""
RUN_FAILED = 3
"""Exit code of replay after a run that has failed, and of a rollout server that was told so: starting it again is no
use either."""

TRY_AGAIN = 75
"""Exit code (EX_TEMPFAIL of sysexits.h) of a start that what still runs has kept from its run folder."""

CHECKPOINT = signal.SIGUSR2
"""What the launcher sends to replay before it ends a run: the next batch asks the learner for a checkpoint."""

LOUD = 100
"""So many lines of one kind are all logged, then every so many-th."""


def die_with_parent(parent_pid: int | None = None) -> None:
    """Be killed when the parent dies. Call it first, from the main thread. Raises OSError.

    When `parent_pid` is gone already, this process exits at once. None takes the parent of this moment, which is init
    (1) if it died before.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        sys.exit(f"parent {parent_pid} is gone already")


class LogForm(logging.Formatter):
    """The form of all logs; the code of an error stands at the end of the line that speaks of it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s {name} %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without what follows it, such as a traceback."""
        return coded(super().formatMessage(record), "")


def set_up_logging(name: str, run_dir: str | os.PathLike[str] | None, level: int = logging.INFO) -> None:
    """Log to stderr and, unless run_dir is None, to `<run_dir>/logs/<name>.log`.

    Children of the launcher have their stderr in that file already, and pass None.
    """
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if run_dir is not None:
        folder = Path(run_dir) / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(folder / f"{name}.log"))
    for handler in handlers:
        handler.setFormatter(LogForm(name))
    logging.raiseExceptions = False  # a disk that is full would get a traceback for each line
    logging.basicConfig(level=level, handlers=handlers, force=True)


class BoundedLog:
    """Log lines of what may happen without end, few enough not to fill the disk."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[str] = Counter()

    def warning(self, kind: str, text: str, *values: object) -> None:
        self._counts[kind] += 1
        count = self._counts[kind]
        if count <= LOUD:
            self._log.warning(text, *values)
        elif count % LOUD == 0:
            self._log.warning(f"{text} (no. %d)", *values, count)


class Cores:
    """CPU cores that this process and its children keep busy."""

    def __init__(self) -> None:
        self._at, self._cpu_s = time.monotonic(), cpu_seconds()

    def take(self) -> float:
        """CPU seconds a second, since the last call."""
        before_at, before_s = self._at, self._cpu_s
        self._at, self._cpu_s = time.monotonic(), cpu_seconds()
        return max(0.0, self._cpu_s - before_s) / max(1e-6, self._at - before_at)


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children that it has, and of theirs, so far (Linux; elsewhere its own)."""
    found = (of(int(child)) for child in _children("self"))
    return time.process_time() + sum(child.cpu_s for child in found if child is not None)


def _children(pid: str) -> list[str]:
    """Children, and theirs, of a process that may end meanwhile."""
    found: list[str] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in tasks.read_text().split():
                found += [child, *_children(child)]
    return found
