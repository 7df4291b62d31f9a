"""Files of a run on a disk that fills up: what finds no room waits in memory, is said once, and is written later.

A full disk ends no run. Lines and small files of a process go through one `Disk`; who writes more waits with
`until_room`. The journal has rules of its own (replay/journal/writer.py), for nobody may hear of what it has not.
"""

import errno
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
RETRY_S = 2.0


class Disk:
    """Writes files in the order in which they are given. Not safe to share between threads."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Path, int, bytes]] = deque()
        self._full_since = 0.0

    def append(self, path: Path, text: str) -> None:
        """Add to a file. Raises OSError for any reason but a full disk."""
        self._add(path, os.O_APPEND, text)

    def write(self, path: Path, text: str) -> None:
        """Make a file anew, with its folder. Raises as `append`."""
        self._add(path, os.O_TRUNC, text)

    def settle(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait until everything is written; `meanwhile` runs each time before it is tried again."""
        while not self.retry():
            meanwhile()
            time.sleep(RETRY_S)

    def retry(self) -> bool:
        """Write what waits; whether nothing does any more."""
        while self._waiting:
            path, mode, data = self._waiting[0]
            try:
                _write(path, mode, data)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not self._full_since:
                    self._full_since = time.monotonic()
                    log.error(
                        "%s: its disk is full (%s): %s waits in memory, and is written once there is room [full]",
                        path.parent, error.strerror, path.name,
                    )  # fmt: skip
                return False
            self._waiting.popleft()
        if self._full_since:
            log.info(
                "the disk has room again after %.0f s: what waited is written", time.monotonic() - self._full_since
            )
            self._full_since = 0.0
        return True

    def _add(self, path: Path, mode: int, text: str) -> None:
        self._waiting.append((path, mode, text.encode()))
        self.retry()


def until_room(work: Callable[[], Result], folder: Path, meanwhile: Callable[[], None]) -> Result:
    """The result of `work`, which is done again while the disk is full: once all is well, or it fails otherwise."""
    waits = False
    while True:
        try:
            return work()
        except (OSError, RuntimeError) as error:
            if not is_full(error):
                raise
            if not waits:
                log.warning("guard: %s: its disk is full, which is waited for: %s [full]", folder, error)
            waits = True
        meanwhile()
        time.sleep(RETRY_S)


def check_room(folder: Path, num_bytes: int) -> None:
    """Raises OSError (ENOSPC): the disk of a folder has less room than this; what tries would fill it for others."""
    folder.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(folder).free) < num_bytes:
        text = f"{folder}: {num_bytes / 1e6:,.1f} MB are needed, its disk has {free / 1e6:,.1f} MB"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {text}")


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is that of a full disk, a used quota or a file that may not grow."""
    return error is not None and (getattr(error, "errno", None) in FULL or is_full(error.__cause__))


def _write(path: Path, mode: int, data: bytes) -> None:
    """All of it or nothing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode
    try:
        file = os.open(path, flags, 0o644)
    except FileNotFoundError:  # mostly the folder is there, and a shared one takes its time to say so
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, flags, 0o644)
    try:
        size, done = os.fstat(file).st_size, 0
        try:
            while done < len(data):
                done += os.write(file, data[done:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)
