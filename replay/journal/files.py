"""The files of a journal on their disk: what the writing and the syncing thread do there."""

import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from replay.journal.format import JournalError, path_apart, path_of
from replay.journal.reader import JournalReader
from slipstream.runtime.disk import FULL

log = logging.getLogger(__name__)

MAX_BUFFERS = 512
"""Buffers of one system call (IOV_MAX is 1,024)."""
COPY_BYTES = 1 << 20
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
Fsync = Literal["every", "interval", "never"]


class JournalFull(JournalError, code="SLIP-JOURNAL-03"):
    """The disk takes no more. What was appended is kept and written once there is room."""


class JournalReadOnly(JournalError, code="SLIP-JOURNAL-04"):
    """The journal may not be written any more, and waiting does not change that."""


class FolderLock:
    """One process writes a journal: a second one would cut and overwrite what the first is writing.

    Held until `close` or the end of the process, however it ends.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder if need be. Raises JournalError: another holds it, or it is unwritable."""
        self._file = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise JournalError(
                f"{folder}: another replay is writing this journal; let that run end, or end it, before it is resumed"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                self.close()
                raise _unwritable(folder, error) from error
            log.warning("replay: %s: its file system has no locks; start no second replay on this journal", folder)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class SegmentFiles:
    """The present file of a journal and those before it. One thread writes; `sync` may be called in another."""

    def __init__(self, folder: Path, fsync: Fsync, after: JournalReader) -> None:
        """Go on behind the last record that `after` has read, and cut what is there.

        Raises JournalError: the folder cannot be written.
        """
        self.folder, self._fsync = folder, fsync
        self.segment, self.size, self.number = after.last, after.end, after.number
        """The present file, its bytes that are written (with fsync `every` on the disk), its last record."""
        self.on_disk = self.segment, 0
        """A file, and how many bytes of it are on the disk, as far as it is known."""
        self.number_on_disk = self.number if fsync == "never" else 0
        """Last record that is on the disk; with fsync `never` of those that are written."""
        self._sync_failed = False
        """The system may have given up on the pages behind `on_disk`, so they must be written again."""
        self._file = -1
        self._syncing = threading.Lock()
        self._switch = threading.Lock()
        """Held while the present file changes."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self.segment:
                self._open()
        except OSError as error:
            raise _unwritable(folder, error) from error

    def _open(self) -> None:
        self._file = os.open(path_of(self.folder, self.segment), os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(self._file, self.size)
        os.lseek(self._file, self.size, os.SEEK_SET)
        if self._fsync != "never":  # what was read may be in memory only, and others are going to rely on it
            os.fdatasync(self._file)
            self.on_disk, self.number_on_disk = (self.segment, self.size), self.number

    def begin(self, segment: int) -> None:
        """Go on in a new file, once the present one is on the disk. Raises JournalError; nothing changes then."""
        if self._file >= 0:
            self.sync()
        path = path_of(self.folder, segment)
        try:
            file = self._new_file(path)
        except OSError as error:
            raise journal_error(error, path, "it cannot be begun") from error
        previous = self._file
        with self._switch:
            self._file, self.segment, self.size, self.on_disk = file, segment, 0, (segment, 0)
            self._sync_failed = False
        if previous >= 0:
            os.close(previous)

    def write(self, buffers: Sequence[bytes | memoryview], number: int) -> None:
        """Append records up to `number`; with fsync `every` they are on the disk then.

        Raises JournalError (JournalFull on a full disk, JournalReadOnly where nothing may be written): the file is as
        it was.
        """
        size = sum(map(len, buffers))
        try:
            _write_all(self._file, buffers)
            if self._fsync == "every":
                os.fdatasync(self._file)
        except OSError as error:
            # Back to the last whole state: a half-written record must not be followed by another one. A sync that
            # failed may have given up its pages, so they are written again as well.
            os.lseek(self._file, self.size, os.SEEK_SET)
            with contextlib.suppress(OSError):  # a full disk may refuse even this; the next write goes over it
                os.ftruncate(self._file, self.size)
            raise journal_error(error, path_of(self.folder, self.segment), f"{size} bytes cannot be written") from error
        with self._switch:
            self.size, self.number = self.size + size, number
            if self._fsync == "every":
                self.on_disk = self.segment, self.size
            if self._fsync != "interval":
                self.number_on_disk = number

    def sync(self) -> None:
        """Wait until what is written by now is on the disk (unless fsync is never); the writing goes on meanwhile.

        Raises JournalError.
        """
        if self._fsync == "never" or self.on_disk == (self.segment, self.size):
            return
        path = path_of(self.folder, self.segment)
        try:
            self._sync_a_copy()
        except OSError as error:
            raise journal_error(error, path, "it cannot be synced") from error

    def _sync_a_copy(self) -> None:
        with self._switch:
            segment, size, number, file = self.segment, self.size, self.number, os.dup(self._file)
        try:
            with self._syncing:  # one at a time: a file reports a failed sync once, and to one caller only
                if self._sync_failed:
                    _write_again(file, self.on_disk[1], size)
                self._sync_failed = True
                os.fdatasync(file)
                self._sync_failed = False
        finally:
            os.close(file)
        with self._switch:
            if segment == self.segment:
                self.on_disk = segment, max(self.on_disk[1], size)
            self.number_on_disk = max(self.number_on_disk, number)

    def _new_file(self, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            if self._fsync != "never":
                sync_folder(self.folder)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        return file

    def delete(self, segments: Iterable[int]) -> list[int]:
        """Delete files; those that are gone. One that cannot be deleted is logged."""
        gone = []
        for segment in segments:
            path = path_of(self.folder, segment)
            try:
                path.unlink(missing_ok=True)
                path_apart(self.folder, segment).unlink(missing_ok=True)
                gone.append(segment)
            except OSError as error:
                log.warning("replay: %s: not deleted, although no longer needed: %s", path, error.strerror)
        return gone

    def close(self) -> None:
        os.close(self._file)
        self._file = -1


def _write_all(file: int, buffers: Sequence[bytes | memoryview]) -> None:
    done, skip = 0, 0
    while done < len(buffers):
        head = memoryview(buffers[done])[skip:]
        count = os.writev(file, [head, *buffers[done + 1 : done + MAX_BUFFERS]])
        while done < len(buffers) and count >= len(buffers[done]) - skip:
            count -= len(buffers[done]) - skip
            done, skip = done + 1, 0
        skip += count


def _write_again(file: int, start: int, stop: int) -> None:
    """Make what a file holds between two offsets something that the next sync writes."""
    for offset in range(start, stop, COPY_BYTES):
        os.pwrite(file, os.pread(file, min(COPY_BYTES, stop - offset), offset), offset)


def sync_folder(folder: Path) -> None:
    """Make names of new files in it durable. Raises OSError."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _unwritable(folder: Path, error: OSError) -> JournalError:
    return JournalError(f"{folder}: the journal cannot be written: {error.strerror}; free or mend it")


def journal_error(error: OSError, path: Path, what: str) -> JournalError:
    """Of its kind, with what to do."""
    kind, mend = JournalError, "mend the disk"
    if error.errno in FULL:
        kind, mend = JournalFull, "free space on its disk"
    elif error.errno in READ_ONLY:
        kind, mend = JournalReadOnly, "make it writable and --resume the run"
    return kind(f"{path}: {what}: {error.strerror}; {mend}")
