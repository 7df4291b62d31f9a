"""Reads a journal: every record in order up to a torn end, and messages by place.

What stands behind the last whole record of a file is a torn end, or damage. A killed process leaves at most one record
that is cut short. A power failure takes what was not synced, in any blocks: one that is missing reads as zeros,
and whole records may follow it. Records of kind `synced` say how far the file was synced: that is no torn end.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from replay.channel import WireError
from replay.channel.frames import decode
from replay.journal.format import (
    FORMAT,
    MAGIC,
    JournalDamaged,
    JournalError,
    Location,
    Record,
    path_of,
    read_frames,
    read_meta,
    read_record,
    scan,
    segments,
)
from replay.messages import TO_REPLAY, EvaluationResult, Group

log = logging.getLogger(__name__)

SEARCH_BYTES = 1 << 20
BLOCK_BYTES = 4096
"""What file systems write as a whole."""
WAY_OUT = (
    "restore the file from a copy, or move the journal folder away and --resume from the checkpoint (the prompts of"
    " lost groups are sampled again)"
)


class JournalReader:
    """The journal of a run folder, for reading."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0
        """Of the last record that `records` gave."""
        self.last = 0
        """Last file."""
        self.end = 0
        """Bytes of it that are whole."""
        self.torn_bytes = 0

    def records(self, first: int | None = None, *, cut: bool = False) -> Iterator[Record]:
        """Records from file `first` on (default: the first that is there).

        `cut` removes a torn end of the last file, as one who writes on must.

        Raises:
            JournalDamaged: a record is broken and others follow, or records are missing.
            JournalError: the journal is of another format or cannot be read.
        """
        numbers = [number for number in segments(self.folder) if first is None or number >= first]
        self.number = self.last = self.end = self.torn_bytes = 0
        for segment in numbers:
            if self.last and segment != self.last + 1:
                raise JournalDamaged(
                    f"{path_of(self.folder, self.last + 1)}: this file of the journal is missing; {WAY_OUT}"
                )
            self.last = segment
            yield from self._file_records(segment, is_last=segment == numbers[-1], cut=cut)

    def read(self, location: Location) -> Group | EvaluationResult:
        """The message at a place. Raises JournalError: it is not there or damaged."""
        path = path_of(self.folder, location.segment)
        try:
            with path.open("rb") as file:
                frames = read_frames(file, location)
        except OSError as error:
            raise JournalDamaged(
                f"{path}: byte {location.offset}: a message that is needed cannot be read: {error.strerror}; {WAY_OUT}"
            ) from error
        return message_of(frames, path, location)

    def newest_snapshot(self) -> int | None:
        """The last file that begins with a whole snapshot; None when all records from the first on are there.

        Raises JournalError: a file cannot be read, or the first ones are gone and no snapshot takes their place.
        """
        numbers = segments(self.folder)
        for segment in reversed(numbers):
            with _opened(path_of(self.folder, segment)) as file:
                for position, record in enumerate(scan(file, segment, file.seek(0, os.SEEK_END))):
                    if isinstance(record, int) or position > 1:
                        break
                    if record.kind == "snapshot":
                        return segment
        if numbers and numbers[0] != 1:
            raise JournalDamaged(
                f"{path_of(self.folder, numbers[0])}: the journal begins with this file, and no file begins with the"
                f" snapshot that would take the place of those before it; {WAY_OUT}"
            )
        return None

    def _file_records(self, segment: int, *, is_last: bool, cut: bool) -> Iterator[Record]:
        path = path_of(self.folder, segment)
        with _opened(path) as file:
            size = file.seek(0, os.SEEK_END)  # once: replay may be writing on
            for position, record in enumerate(scan(file, segment, size)):
                if isinstance(record, int):
                    self._check_end(path, file, size, record, is_last=is_last, cut=cut)
                    return
                if position == 0:
                    _check_first(path, segment, record)
                if self.number and record.number != self.number + 1:
                    raise JournalDamaged(
                        f"{path}: record {record.number} follows record {self.number}; one is missing; {WAY_OUT}"
                    )
                self.number = record.number
                yield record

    def _check_end(self, path: Path, file: BinaryIO, size: int, end: int, *, is_last: bool, cut: bool) -> None:
        self.end = end
        if end == size and (end or is_last):
            return
        behind = _follows_behind(file, self.last, size, end) if is_last else None
        if behind is not None or not is_last:
            what = f"record {behind.number} follows" if behind is not None else "other files follow"
            raise JournalDamaged(
                f"{path}: byte {end}: no whole record there although {what}, so this is damage and not a torn end;"
                f" {WAY_OUT}"
            )
        if end == 0 and _is_no_journal(file):
            raise JournalDamaged(f"{path}: byte 0: no record begins like that; this is no file of a journal; {WAY_OUT}")
        self.torn_bytes = size - end
        done = "cut" if cut else "passed over"
        log.warning("replay: %s: the last %d bytes are a torn record and are %s", path, size - end, done)
        if cut:
            os.truncate(path, end)


def message_of(frames: Sequence[bytes | memoryview], path: Path, location: Location) -> Group | EvaluationResult:
    """The message in the frames of a record. Raises JournalDamaged."""
    try:
        message = decode(frames, TO_REPLAY).message
    except WireError as error:
        raise JournalDamaged(
            f"{path}: byte {location.offset}: a message that is needed is damaged: {error}; {WAY_OUT}"
        ) from error
    assert isinstance(message, (Group, EvaluationResult))
    return message


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise JournalError(
            f"{path}: the journal cannot be read: {error.strerror}; mend the file or its disk"
        ) from error


def _check_first(path: Path, segment: int, record: Record) -> None:
    """Raises JournalError when the file is of another format, or is not the one that its name says."""
    if record.kind == "segment" and record.fields.get("format") != FORMAT:
        raise JournalError(
            f"{path}: format {record.fields.get('format')!r}, this version reads {FORMAT}; go on with the version that"
            " wrote it"
        )
    if record.kind != "segment" or record.fields.get("number") != segment:
        raise JournalDamaged(
            f"{path}: begins with {record.kind!r} of file {record.fields.get('number')}, so it is not the file that its"
            f" name says; {WAY_OUT}"
        )


def _follows_behind(file: BinaryIO, segment: int, size: int, end: int) -> Record | None:
    """The record that makes what stands at `end` of the last file, of `size` bytes, damage; None for a torn end.

    Its whole records end there. What those before it say to be synced lies before them; only one behind it can say
    that this was.
    """
    started = read_meta(file, segment, end, size)
    # What is in its frames is part of it, whatever it looks like; frames that were cut short have nothing behind them.
    behind = list(_whole_from(file, segment, end + 1 if started is None else started.location.end, size))
    if not behind:
        return None
    offset, first = behind[0]
    synced = max(_synced_until(record) for _, record in behind)
    return None if synced <= end and _lacks_a_block(file, end, offset) else first


def _synced_until(record: Record) -> int:
    """Bytes of its file that were on the disk when this record was appended, as far as it says so."""
    return int(record.fields["until"]) if record.kind == "synced" else 0


def _is_no_journal(file: BinaryIO) -> bool:
    """Whether the file begins with something that a journal, torn or not, cannot begin with."""
    file.seek(0)
    begin = file.read(len(MAGIC))
    return begin != MAGIC[: len(begin)] and any(begin)


def _whole_from(file: BinaryIO, segment: int, offset: int, size: int) -> Iterator[tuple[int, Record]]:
    """Whole records from `offset` on with where they begin; what is broken between them is passed over."""
    while offset < size:
        record = read_record(file, segment, offset, size)
        if record is not None:
            yield offset, record
            offset = record.location.end
            continue
        file.seek(offset + 1)
        found = file.read(SEARCH_BYTES + len(MAGIC) - 1).find(MAGIC)
        offset += 1 + (SEARCH_BYTES if found < 0 else found)


def _lacks_a_block(file: BinaryIO, start: int, stop: int) -> bool:
    """Whether a block between two offsets, or the rest of the block at the first one, is nothing but zeros."""
    while start < stop:
        end = min(stop, start - start % BLOCK_BYTES + BLOCK_BYTES)
        file.seek(start)
        if end % BLOCK_BYTES == 0 and not any(file.read(end - start)):
            return True
        start = end
    return False
