"""What stands at the end of a file behind its last whole record: a torn end, or damage.

A process that is killed leaves at most one record that is cut short. A power failure takes what was not synced, in
blocks and in any order: a block that is missing reads as zeros, and whole records may follow it. How far the file was
synced stands in its records of kind `synced`, each written after that sync; what was on the disk then is no torn end.
"""

from collections.abc import Iterator
from typing import BinaryIO

from replay.journal.format import MAGIC, Record, read_meta, read_record

SEARCH_BYTES = 1 << 20
BLOCK_BYTES = 4096
"""What file systems write as a whole."""


def follows_behind(file: BinaryIO, segment: int, end: int, synced: int) -> Record | None:
    """The record that makes what stands at `end` damage; None for a torn end.

    Args:
        file: the last of the journal.
        segment: its number.
        end: where its whole records end, less than its size.
        synced: up to where its whole records say that it was synced.
    """
    size = file.seek(0, 2)
    started = read_meta(file, segment, end, size)
    # What is in its frames is part of it, whatever it looks like; frames that were cut short have nothing behind them.
    behind = list(_whole_from(file, segment, end + 1 if started is None else started.location.end, size))
    if not behind:
        return None
    offset, first = behind[0]
    synced = max([synced, *(synced_until(record) for _, record in behind)])
    return None if synced <= end and _lacks_a_block(file, end, offset) else first


def synced_until(record: Record) -> int:
    """Bytes of its file that were on the disk when this record was appended, as far as it says so."""
    return int(record.fields["until"]) if record.kind == "synced" else 0


def is_no_journal(file: BinaryIO) -> bool:
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
