"""Appends to the journal. Nothing blocks but the write itself; syncing has a thread of its own.

`append` keeps a record in memory; `flush` writes what was appended, and only after it may anybody be told. When the
disk is full `flush` says so and keeps everything, to be tried again.
"""

import contextlib
import errno
import fcntl
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from replay.journal.format import FORMAT, Frames, JournalError, Location, pack, path_of, segments
from replay.journal.reader import JournalReader, message_of
from replay.messages import EvaluationResult, Group
from slipstream.runtime.disk import FULL

log = logging.getLogger(__name__)

SEGMENT_BYTES = 128 * 1024 * 1024
SYNC_S = 1.0
MAX_BUFFERS = 512
"""Buffers of one system call (IOV_MAX is 1,024)."""
COPY_BYTES = 1 << 20
READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
Fsync = Literal["every", "interval", "never"]


class JournalFull(JournalError, code="SLIP-JOURNAL-03"):
    """The disk takes no more. What was appended is kept and written with the next flush."""


class JournalReadOnly(JournalError, code="SLIP-JOURNAL-04"):
    """The journal may not be written any more, and waiting does not change that."""


class Journal:
    """What the service needs of a journal. This one keeps nothing, and is the base of those that do."""

    @property
    def segment(self) -> int:
        """Number of the present file."""
        return 1

    @property
    def size_bytes(self) -> int:
        """Of all files, what is not written yet included."""
        return 0

    def append(self, kind: str, fields: dict[str, Any], frames: Frames = ()) -> Location:
        """Add a record; where its frames will be."""
        return Location(1, 0, ())

    def flush(self) -> None:
        """Write what was appended. Raises JournalError; nothing is lost then, and the next flush tries again."""

    def read(self, location: Location) -> Group | EvaluationResult:
        """The message of a record. Raises JournalError."""
        raise JournalError(f"no message at {location}: this journal keeps nothing")

    def begin_segment(self) -> None:
        """Go on in a new file, whose first record should be a snapshot. Raises JournalError; nothing changes then."""

    def release(self, first: int) -> None:
        """Files before number `first` are not needed: they go with the next flush, once what precedes it is synced."""

    def want_sync(self) -> None:
        """Have the next flush wait until everything is on the disk (unless fsync is never)."""

    def close(self) -> None:
        """Write and sync what is left."""


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


class JournalWriter(Journal):
    """The journal of a run folder. Not thread-safe, except for its own syncing."""

    def __init__(
        self,
        folder: Path,
        run_id: str,
        *,
        fsync: Fsync,
        after: JournalReader | None = None,
        lock: FolderLock | None = None,
    ) -> None:
        """Go on behind the last record that `after` has read, and cut what is there; None begins a new journal.

        `run_id` is for people who read the files; `lock` is given back by `close`. Raises JournalError: the folder
        cannot be written.
        """
        self.folder, self._run_id, self._fsync, self._lock = folder, run_id, fsync, lock
        self._reader = JournalReader(folder) if after is None else after
        self._number, self._segment, self._written = self._reader.number, self._reader.last, self._reader.end
        self._file = -1
        self._synced = 0
        """Bytes of the present file that are on the disk, as far as it is known."""
        self._sync_failed = False
        """The system may have given up on the pages behind `_synced`, so they must be written again."""
        self._told = 0
        """Up to where the present file says that it is synced (replay/journal/reader.py)."""
        self._pending: list[bytes | memoryview] = []
        self._pending_bytes = 0
        self._unwritten: dict[int, Frames] = {}
        """Frames of pending records, by where they will be in the present file."""
        self._older: dict[int, int] = {}
        """Bytes of the files before the present one."""
        self._first_needed = 0
        self._want_sync = False
        self._dirty, self._closed = threading.Event(), threading.Event()
        self._syncing = threading.Lock()
        self._switch = threading.Lock()
        """Held while the present file changes."""
        try:
            self._open()
        except OSError as error:
            raise _unwritable(folder, error) from error
        if self._written == 0:
            self._begin() if self._segment else self.begin_segment()
            self.flush()
        self._thread: threading.Thread | None = None
        if fsync == "interval":
            self._thread = threading.Thread(target=self._sync_now_and_then, name="journal-sync", daemon=True)
            self._thread.start()

    @property
    def segment(self) -> int:
        return self._segment

    @property
    def size_bytes(self) -> int:
        return sum(self._older.values()) + self._written + self._pending_bytes

    def append(self, kind: str, fields: dict[str, Any], frames: Frames = ()) -> Location:
        if self._told < self._synced:
            self._told = self._synced
            self._add("synced", {"until": self._told}, ())
        return self._add(kind, fields, frames)

    def flush(self) -> None:
        """As `Journal.flush`, raising JournalFull on a full disk and JournalReadOnly where nothing may be written.

        With fsync `every` it waits until everything is on the disk.
        """
        self._write()
        if self._want_sync:
            self._sync()
        self._want_sync = False
        if self._first_needed:
            self._sync()  # what takes the place of the deleted files must outlive a power failure, too
            self._delete()
        if self._written > SEGMENT_BYTES:
            self.begin_segment()

    def begin_segment(self) -> None:
        self._write()
        if self._file >= 0:
            self._sync()
        path = path_of(self.folder, self._segment + 1)
        try:
            file = self._new_file(path)
        except OSError as error:
            raise _error(error, path, "it cannot be begun") from error
        previous, size = self._file, self._written
        with self._switch:
            self._file, self._segment, self._written, self._synced, self._told = file, self._segment + 1, 0, 0, 0
            self._sync_failed = False
        if previous >= 0:
            os.close(previous)
            self._older[self._segment - 1] = size
        self._begin()

    def want_sync(self) -> None:
        self._want_sync = True

    def read(self, location: Location) -> Group | EvaluationResult:
        if location.segment == self._segment and location.offset >= self._written:
            path = path_of(self.folder, self._segment)
            return message_of(self._unwritten[location.offset], path, location)
        return self._reader.read(location)

    def release(self, first: int) -> None:
        self._first_needed = max(self._first_needed, first)

    def close(self) -> None:
        if self._file < 0:
            return
        self._closed.set()
        self._dirty.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.flush()
            self._sync()
        except JournalError as error:
            log.error("replay: the end of the journal was not written: %s [full]", error)
        os.close(self._file)
        self._file = -1
        if self._lock is not None:
            self._lock.close()

    def _add(self, kind: str, fields: dict[str, Any], frames: Frames) -> Location:
        self._number += 1
        meta = pack(kind, self._number, fields, frames)
        offset = self._written + self._pending_bytes + len(meta)
        location = Location(self._segment, offset, tuple(len(frame) for frame in frames))
        self._pending += [meta, *(frame for frame in frames if len(frame))]
        self._pending_bytes += len(meta) + sum(location.sizes)
        if frames:
            self._unwritten[offset] = frames
        return location

    def _begin(self) -> None:
        self._add("segment", {"format": FORMAT, "number": self._segment, "run_id": self._run_id}, ())

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for segment in segments(self.folder):
            if segment != self._segment:
                self._older[segment] = path_of(self.folder, segment).stat().st_size
        if not self._segment:
            return
        self._file = os.open(path_of(self.folder, self._segment), os.O_RDWR | os.O_CLOEXEC)
        os.ftruncate(self._file, self._written)
        os.lseek(self._file, self._written, os.SEEK_SET)
        if self._fsync != "never":  # what was read may be in memory only, and others are going to rely on it
            os.fdatasync(self._file)
            self._synced = self._written

    def _new_file(self, path: Path) -> int:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            if self._fsync != "never":
                _sync_folder(self.folder)
        except OSError:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        return file

    def _delete(self) -> None:
        for segment in [s for s in self._older if s < self._first_needed]:
            path = path_of(self.folder, segment)
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("replay: %s: not deleted, although no longer needed: %s", path, error.strerror)
            else:
                del self._older[segment]
        self._first_needed = 0

    def _write(self) -> None:
        if not self._pending:
            return
        sync = self._fsync == "every"
        try:
            _write_all(self._file, self._pending)
            if sync:
                os.fdatasync(self._file)
        except OSError as error:
            # Back to the last whole state: a half-written record must not be followed by another one. A sync that
            # failed may have given up its pages, so they are written again as well.
            os.lseek(self._file, self._written, os.SEEK_SET)
            with contextlib.suppress(OSError):  # a full disk may refuse even this; the next write goes over it
                os.ftruncate(self._file, self._written)
            path = path_of(self.folder, self._segment)
            raise _error(error, path, f"{self._pending_bytes} bytes cannot be written") from error
        self._written += self._pending_bytes
        if sync:
            self._synced = self._written
        self._pending, self._pending_bytes = [], 0
        self._unwritten.clear()
        self._dirty.set()

    def _sync(self) -> None:
        """Wait until the present file is on the disk (unless fsync is never)."""
        if self._fsync == "never" or self._synced == self._written:
            return
        try:
            self._sync_a_copy()
        except OSError as error:
            raise _error(error, path_of(self.folder, self._segment), "it cannot be synced") from error

    def _sync_now_and_then(self) -> None:
        said = False
        while not self._closed.is_set():
            self._dirty.wait()
            self._dirty.clear()
            try:
                self._sync_a_copy()
                said = False
            except OSError as error:
                if not said:
                    log.error("replay: the journal was not synced, which is tried again: %s [full]", error.strerror)
                self._dirty.set()
                said = True
            self._closed.wait(SYNC_S)

    def _sync_a_copy(self) -> None:
        """Sync what is written by now; the writer may go on meanwhile, also in another file."""
        with self._switch:
            segment, written, file = self._segment, self._written, os.dup(self._file)
        try:
            with self._syncing:  # one at a time: a file reports a failed sync once, and to one caller only
                if self._sync_failed:
                    _write_again(file, self._synced, written)
                self._sync_failed = True
                os.fdatasync(file)
                self._sync_failed = False
        finally:
            os.close(file)
        with self._switch:
            if segment == self._segment:
                self._synced = max(self._synced, written)


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


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _unwritable(folder: Path, error: OSError) -> JournalError:
    return JournalError(f"{folder}: the journal cannot be written: {error.strerror}; free or mend it")


def _error(error: OSError, path: Path, what: str) -> JournalError:
    kind, mend = JournalError, "mend the disk"
    if error.errno in FULL:
        kind, mend = JournalFull, "free space on its disk"
    elif error.errno in READ_ONLY:
        kind, mend = JournalReadOnly, "make it writable and --resume the run"
    return kind(f"{path}: {what}: {error.strerror}; {mend}")
