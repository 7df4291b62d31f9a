"""One process writes a journal: a second one would cut and overwrite what the first is writing."""

import errno
import fcntl
import logging
import os
from pathlib import Path

from replay.journal.format import JournalError

log = logging.getLogger(__name__)

LOCK = "lock"


class FolderLock:
    """Held from the start on and until `close` or the end of the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Make the folder if need be, and lock it.

        Raises:
            JournalError: another process holds it, or the folder cannot be written.
        """
        self._file = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise JournalError(
                f"{folder}: another replay is writing this journal; let that run end, or end it, before it is resumed"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                self.close()
                raise JournalError(
                    f"{folder}: the journal cannot be written: {error.strerror}; free or mend it"
                ) from error
            log.warning("replay: %s: its file system has no locks; start no second replay on this journal", folder)

    def close(self) -> None:
        """Unlock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
