"""Journals in memory: one whose disk can be full, and that loses what was not written when its process dies."""

import random
from typing import Any

import msgpack

from replay.channel import decode
from replay.journal import Journal, JournalError, JournalFull, Location, Record
from replay.journal.format import Frames
from replay.messages import TO_REPLAY, EvaluationResult, Group


class MemoryJournal(Journal):
    """A journal that forgets everything with its process."""

    segment, size_bytes = 1, 0

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.released = 0
        self._frames: dict[tuple[int, int], list[bytes]] = {}

    def append(self, kind: str, fields: dict[str, Any], frames: Frames = ()) -> Location:
        location = Location(self.segment, len(self.records), tuple(len(frame) for frame in frames))
        self.records.append(Record(kind, len(self.records) + 1, fields, location))
        self.size_bytes += sum(location.sizes)
        if frames:
            self._frames[location.segment, location.offset] = [bytes(frame) for frame in frames]
        return location

    def read(self, location: Location) -> Group | EvaluationResult:
        assert location.segment >= self.released, "a released file is read"
        message = decode(self._frames[location.segment, location.offset], TO_REPLAY).message
        assert isinstance(message, (Group, EvaluationResult))
        return message

    def begin_segment(self) -> None:
        self.segment += 1

    def release(self, first: int) -> None:
        self.released = first
        self._frames = {place: frames for place, frames in self._frames.items() if place[0] >= first}


class SimulatedJournal(MemoryJournal):
    """Implements `Journal`; `full` and `lazy` are for the simulation to set: what is handed over is written at once,
    or with `lazy` when `write` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.full = self.lazy = False
        self.submitted = self.flushed = self.synced = 0
        """Records that were handed over, that are written, and that are on the disk."""
        self.releases: tuple[int, ...] = ()
        """The first file that is needed, and the records that must be on the disk before the others go."""
        self.history: list[Record] = []
        """All records that ever were on the disk, whatever was cut or released since."""

    def append(self, kind: str, fields: dict[str, Any], frames: Frames = ()) -> Location:
        """See `Journal.append`; the fields are kept as the file would have them."""
        plain = msgpack.unpackb(msgpack.packb(fields), strict_map_key=False)
        return super().append(kind, plain, frames)

    @property
    def written(self) -> int:
        return self.flushed

    @property
    def on_disk(self) -> int:
        return self.synced

    @property
    def problem(self) -> JournalError | None:
        is_held = self.full and self.flushed < self.submitted
        return JournalFull("simulated journal: no space left; nothing is lost") if is_held else None

    def submit(self) -> int:
        self.submitted = len(self.records)
        if not self.lazy:
            self.write(self.submitted)
            self.sync(self.submitted)
        return self.submitted

    def want_sync(self) -> int:
        return len(self.records)

    def write(self, count: int) -> None:
        """So many of the records that were handed over are written now."""
        if not self.full:
            self.history += self.records[self.flushed : count]
            self.flushed = max(self.flushed, count)

    def sync(self, count: int) -> None:
        """So many of those that are written are on the disk now; files that were released until then go."""
        self.synced = max(self.synced, min(count, self.flushed))
        if self.releases and self.synced >= self.releases[1]:
            super().release(self.releases[0])
            self.releases = ()

    def release(self, first: int) -> None:
        self.releases = first, len(self.records)

    def begin_segment(self) -> None:
        self.submit()
        super().begin_segment()
        self.append("segment", {"format": 1, "number": self.segment, "run_id": "simulated"})

    def crash(self, rng: random.Random | None) -> "SimulatedJournal":
        """What the next process finds: all that was flushed and, with `rng`, some of what was not; without it, all."""
        found = SimulatedJournal()
        last = len(self.records)
        if rng is not None:
            last = self.flushed if self.full else rng.randint(self.flushed, last)
        found.records = self.records[:last]
        found.submitted = found.flushed = found.synced = last
        found.history = self.history + self.records[self.flushed : last]
        found.segment = max((record.location.segment for record in found.records), default=1)
        found.size_bytes, found.released = self.size_bytes, self.released
        found._frames = {place: frames for place, frames in self._frames.items() if place[1] < last}
        return found

    def newest_snapshot(self) -> int:
        """Index of the record that recovery begins at; 0 without a snapshot."""
        return max((index for index, record in enumerate(self.records) if record.kind == "snapshot"), default=0)
