"""A second reader of journal files, written from the format alone (docs/protocol.md): it shares no code with replay.

    magic  4 bytes  b"SJR1"
    size   u32 LE   bytes of meta
    crc    u32 LE   zlib.crc32(meta)
    meta   msgpack array [kind, number, fields, frame_sizes]
    frames one wire message: header frame, array frames; the last 4 bytes of the header are the message's own checksum

Each file begins with a record `segment`; numbers count over the whole journal.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

MAGIC = b"SJR1"
HEAD = struct.Struct("<4sII")
CHECKSUM_BYTES = 4


class Damage(ValueError):
    """Bytes of a journal that are no record, where records must be; the message names file and offset."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record. Example: Record("000002.seg", 840, "take", 1207, {"step": 9, ...}, ())"""

    file: str
    offset: int
    kind: str
    number: int
    fields: dict[str, Any]
    frames: tuple[bytes, ...]

    def __str__(self) -> str:
        return f"record {self.number} ({self.kind}, {self.file} at {self.offset})"


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.seg"))


def record_at(data: bytes, offset: int, file: str) -> tuple[Record, int] | None:
    """The record at `offset` and where the next begins; None when there is no whole and sound record."""
    if len(data) - offset < HEAD.size:
        return None
    magic, size, crc = HEAD.unpack_from(data, offset)
    end = offset + HEAD.size + size
    meta = data[offset + HEAD.size : end]
    if magic != MAGIC or len(meta) != size or zlib.crc32(meta) != crc:
        return None
    kind, number, fields, sizes = msgpack.unpackb(meta)
    frames = []
    for frame_size in sizes:
        frames.append(data[end : end + frame_size])
        end += frame_size
    if end > len(data) or not sound(frames):
        return None
    return Record(file, offset, kind, number, fields, tuple(frames)), end


def sound(frames: Sequence[bytes]) -> bool:
    """Whether a wire message has the checksum that it carries; true of no message at all."""
    crc = 0
    for frame in [frames[0][:-CHECKSUM_BYTES], *frames[1:]] if frames else []:
        crc = zlib.crc32(frame, crc)
    return not frames or frames[0][-CHECKSUM_BYTES:] == crc.to_bytes(CHECKSUM_BYTES, "little")


def records_of(data: bytes, file: str) -> tuple[list[Record], int]:
    records, offset = [], 0
    while (found := record_at(data, offset, file)) is not None:
        record, offset = found
        records.append(record)
    return records, offset


def read(folder: Path) -> tuple[list[Record], int]:
    """All records of a journal, and how many bytes of a torn record end its last file.

    Raises Damage where there is no journal, or bytes that are no record stand anywhere but at the very end.
    """
    files = segments(folder)
    if not files:
        raise Damage(f"{folder}: no *.seg files")
    records: list[Record] = []
    torn = 0
    for path in files:
        data = path.read_bytes()
        found, offset = records_of(data, path.name)
        records += found
        torn = len(data) - offset
        behind = (at for at in range(offset + 1, len(data)) if data.startswith(MAGIC, at))
        if torn and (path != files[-1] or any(record_at(data, at, path.name) for at in behind)):
            raise Damage(f"{path} at {offset}: {torn} bytes are no record, and records follow")
    return records, torn


def arrays(record: Record) -> dict[str, NDArray[Any]]:
    """The arrays of a record's message by name, from its header's list of [name, dtype, shape]."""
    described = msgpack.unpackb(record.frames[0])["arrays"]
    return {
        name: np.frombuffer(frame, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)
        for (name, dtype, shape), frame in zip(described, record.frames[1:], strict=True)
    }


class Tail:
    """Follows a journal that is being written: each `poll` yields the records that are whole by now."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._file, self._offset = folder, "", 0

    def poll(self) -> Iterator[Record]:
        """Records since the last call. A torn end is read again: replay cuts it and writes on in its place."""
        for path in segments(self.folder):
            if path.name > self._file:
                self._file, self._offset = path.name, 0
            if path.name == self._file:
                with path.open("rb") as file:
                    file.seek(self._offset)
                    records, size = records_of(file.read(), path.name)
                self._offset += size
                yield from records
