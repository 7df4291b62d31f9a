"""Appends to the journal. Nothing here blocks: one thread writes, in the order of the records, another one syncs.

`append` keeps a record in memory, `submit` hands over what was appended, and `written` and `on_disk` say up to which
record it has come. What was handed over while the disk was busy is written and synced together. Where the disk fails
`problem` says so, everything is kept, and it is tried again.
"""

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from replay.journal.apart import read_apart, size_apart, whole, write_apart
from replay.journal.files import FolderLock, Fsync, JournalReadOnly, SegmentFiles
from replay.journal.format import FORMAT, Frames, JournalError, Location, pack, path_of, segments
from replay.journal.reader import JournalReader, message_of
from replay.messages import EvaluationResult, Group

log = logging.getLogger(__name__)

SEGMENT_BYTES = 128 * 1024 * 1024
SYNC_S = 1.0
RETRY_S = 0.25


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

    @property
    def written(self) -> int:
        """Number of the last record that no end of this process loses; with fsync `every` no power failure either."""
        return 0

    @property
    def on_disk(self) -> int:
        """Number of the last record that no power failure loses (with fsync `never`: that is written)."""
        return 0

    @property
    def problem(self) -> JournalError | None:
        """What keeps the disk from taking what was handed over; it is tried again, and nothing is lost."""
        return None

    def append(self, kind: str, fields: dict[str, Any], frames: Frames = ()) -> Location:
        """Add a record; where its frames will be."""
        return Location(1, 0, ())

    def submit(self) -> int:
        """Have written what was appended; the number of the last record. Returns at once."""
        return 0

    def read(self, location: Location) -> Group | EvaluationResult:
        """The message of a record. Raises JournalError."""
        raise JournalError(f"no message at {location}: this journal keeps nothing")

    def set_apart(self, group: Group) -> Group:
        """The group without its routing, whose place it has then: `append` its record next."""
        return group

    def whole(self, group: Group) -> Group:
        """The group with its routing. Raises JournalError."""
        return group

    def begin_segment(self) -> None:
        """Go on in a new file, whose first record should be a snapshot."""

    def release(self, first: int) -> None:
        """Files before number `first` are not needed: they go once everything that was appended is on the disk."""

    def want_sync(self) -> int:
        """Have `on_disk` reach the last record as soon as may be; its number."""
        return 0

    def start(self, progress: Callable[[], object]) -> None:
        """Write and sync in threads from now on; `progress` is called there when there is news to look at."""

    def close(self) -> None:
        """Write and sync what is left."""


class _Piece(NamedTuple):
    """Records that are handed over at once: their file, their bytes, the number of the last."""

    segment: int
    buffers: list[bytes | memoryview]
    number: int
    apart: list[tuple[int, bytes]]
    """(place, bytes), which are written first."""


class JournalWriter(Journal):
    """The journal of a run folder. It belongs to one thread, and from `start` on has threads of its own."""

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
        self._files = SegmentFiles(folder, fsync, self._reader)
        self._number, self._segment, self._end = self._files.number, self._files.segment, self._files.size
        self._told = 0
        """Up to where the present file says that it is on the disk (replay/journal/reader.py)."""
        self._appended: list[bytes | memoryview] = []
        self._unwritten: dict[tuple[int, int], tuple[int, Frames]] = {}
        """Frames of records that may not be written yet, with their numbers, by file and offset."""
        self._apart: list[tuple[int, bytes]] = []
        self._apart_end = size_apart(folder, self._segment)
        """Of the present file of routing (replay/journal/apart.py)."""
        self._apart_unwritten: dict[tuple[int, int], tuple[int, bytes]] = {}
        self._changed = threading.Condition()
        """Held for what follows, which the threads share; they are told of new work by it."""
        self._queue: deque[_Piece] = deque()
        self._sizes = {
            s: path_of(folder, s).stat().st_size + size_apart(folder, s) for s in segments(folder) if s != self._segment
        }
        """Bytes of the files before the present one, with those of routing."""
        self._released: tuple[int, int] | None = None
        """The first file that is needed, once this record is on the disk."""
        self._wanted = 0
        """Record up to which a sync is waited for."""
        self._write_problem: JournalError | None = None
        self._sync_problem: JournalError | None = None
        self._closed, self._dirty, self._hurry = threading.Event(), threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._progress: Callable[[], object] = lambda: None
        if self._end == 0:
            self._begin() if self._segment else self.begin_segment()
            self.submit()
            self.write()

    def start(self, progress: Callable[[], object]) -> None:
        self._progress = progress
        work = {"journal-write": self._write_on} | (
            {"journal-sync": self._sync_on} if self._fsync == "interval" else {}
        )
        self._threads = [threading.Thread(target=each, name=name, daemon=True) for name, each in work.items()]
        for thread in self._threads:
            thread.start()

    @property
    def segment(self) -> int:
        return self._segment

    @property
    def size_bytes(self) -> int:
        with self._changed:
            return sum(self._sizes.values()) + self._end + self._apart_end

    @property
    def written(self) -> int:
        return self._files.number

    @property
    def on_disk(self) -> int:
        return self._files.number_on_disk

    @property
    def problem(self) -> JournalError | None:
        if not (self._closed.is_set() or all(thread.is_alive() for thread in self._threads)):
            return JournalReadOnly(f"{self.folder}: a thread of the journal has failed; read the log and --resume")
        return self._write_problem or (self._sync_problem if self.on_disk < self._wanted else None)

    def append(self, kind: str, fields: dict[str, Any], frames: Frames = ()) -> Location:
        segment, until = self._files.on_disk
        if segment == self._segment and self._told < until:
            self._told = until
            self._add("synced", {"until": until}, ())
        return self._add(kind, fields, frames)

    def submit(self) -> int:
        if self._end > SEGMENT_BYTES:
            self.begin_segment()
        self._hand_over()
        written = self.written
        for waiting in (self._unwritten, self._apart_unwritten):
            while waiting and next(iter(waiting.values()))[0] <= written:
                del waiting[next(iter(waiting))]
        return self._number

    def begin_segment(self) -> None:
        if self._segment:
            self._hand_over()
            with self._changed:
                self._sizes[self._segment] = self._end + self._apart_end
        self._segment, self._end, self._told, self._apart_end = self._segment + 1, 0, 0, 0
        self._begin()

    def want_sync(self) -> int:
        self._wanted = self._number
        self._hurry.set()
        return self._wanted

    def read(self, location: Location) -> Group | EvaluationResult:
        if (waiting := self._unwritten.get((location.segment, location.offset))) is not None:
            return message_of(waiting[1], path_of(self.folder, location.segment), location)
        return self._reader.read(location)

    def set_apart(self, group: Group) -> Group:
        if not group.routing.size:
            return group
        data = group.routing.tobytes() + group.prompt_routing.tobytes()
        place = [self._segment, self._apart_end, group.routing.size, group.prompt_routing.size]
        self._apart.append((self._apart_end, data))
        self._apart_unwritten[self._segment, self._apart_end] = self._number + 1, data
        self._apart_end += len(data)
        empty = group.routing[:0]
        return replace(group, routing=empty, prompt_routing=empty, routing_place=place)

    def whole(self, group: Group) -> Group:
        if not group.routing_place:
            return group
        segment, offset = group.routing_place[:2]
        if (waiting := self._apart_unwritten.get((segment, offset))) is not None:
            return whole(group, waiting[1])
        return read_apart(self.folder, group)

    def release(self, first: int) -> None:
        with self._changed:
            self._released = first, self._number
            self._changed.notify_all()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with self._changed:
            self._changed.notify_all()
        self._dirty.set()
        self._hurry.set()
        for thread in self._threads:
            thread.join()
        self.submit()
        try:
            while self.write():
                pass
            self._files.sync()
        except JournalError as error:
            log.error("replay: the end of the journal was not written: %s [full]", error)
        self._files.close()
        if self._lock is not None:
            self._lock.close()

    def write(self) -> bool:
        """Carry out what was handed over for one file, and what is due of `release`; whether there was anything.

        What the writing thread does; before `start` anybody may. Raises JournalError: it stays to be done.
        """
        with self._changed:
            pieces = [piece for piece in self._queue if piece.segment == self._queue[0].segment]
        if pieces:
            if pieces[0].segment != self._files.segment:
                self._files.begin(pieces[0].segment)
            for offset, data in itertools.chain.from_iterable(piece.apart for piece in pieces):
                write_apart(self.folder, pieces[0].segment, offset, data, self._fsync)
            buffers = list(itertools.chain.from_iterable(piece.buffers for piece in pieces))
            self._files.write(buffers, pieces[-1].number)
            with self._changed:
                for _ in pieces:
                    self._queue.popleft()
            self._dirty.set()
            if self._wanted > self.on_disk:
                self._hurry.set()
        self._delete()
        return bool(pieces)

    def sync(self) -> None:
        """Have on the disk what is written; what the syncing thread does. Raises JournalError."""
        self._files.sync()

    def _delete(self) -> None:
        if (released := self._released) is None or self.on_disk < released[1]:
            return
        with self._changed:
            old = [segment for segment in self._sizes if segment < released[0]]
        gone = self._files.delete(old)
        with self._changed:
            for segment in gone:
                del self._sizes[segment]
            if self._released == released:
                self._released = None

    def _add(self, kind: str, fields: dict[str, Any], frames: Frames) -> Location:
        self._number += 1
        meta = pack(kind, self._number, fields, frames)
        location = Location(self._segment, self._end + len(meta), tuple(len(frame) for frame in frames))
        self._appended += [meta, *(frame for frame in frames if len(frame))]
        self._end = location.end
        if frames:
            self._unwritten[location.segment, location.offset] = self._number, frames
        return location

    def _hand_over(self) -> None:
        if self._appended:
            with self._changed:
                self._queue.append(_Piece(self._segment, self._appended, self._number, self._apart))
                self._changed.notify_all()
            self._appended, self._apart = [], []

    def _begin(self) -> None:
        self._add("segment", {"format": FORMAT, "number": self._segment, "run_id": self._run_id}, ())

    def _has_work(self) -> bool:
        due = self._released is not None and self.on_disk >= self._released[1]
        return self._closed.is_set() or bool(self._queue) or due

    def _write_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
            if self._closed.is_set():
                return
            self._write_problem = _problem_of(self.write)
            self._progress()
            if self._write_problem is not None:
                self._closed.wait(RETRY_S)

    def _sync_on(self) -> None:
        while not self._closed.is_set():
            self._dirty.wait()
            self._dirty.clear()
            said, self._sync_problem = self._sync_problem, _problem_of(self.sync)
            if self._sync_problem is not None:
                self._dirty.set()
                if said is None:
                    log.error("replay: the journal was not synced, which is tried again: %s [full]", self._sync_problem)
            with self._changed:
                self._changed.notify_all()  # files that were released may go
            self._progress()
            self._hurry.wait(SYNC_S)
            self._hurry.clear()


def _problem_of(work: Callable[[], object]) -> JournalError | None:
    try:
        work()
    except JournalError as error:
        return error
    return None
