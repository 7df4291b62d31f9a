"""Bytes of the journal: records one after the other, each with its own checksum.

    magic  4 bytes  b"SJR1"
    size   u32 LE   bytes of meta
    crc    u32 LE   CRC-32 of meta
    meta   msgpack  [kind, number, fields, sizes of the frames]
    frames          one wire message, which carries its own checksum (replay/channel/frames.py), or none

Numbers count the records of the whole journal from 1, so that a missing one shows.
"""

import itertools
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgpack

from configs.errors import SlipstreamError
from replay.channel.frames import CRC_BYTES, SCHEMA_VERSION, checksum

FORMAT = SCHEMA_VERSION
"""Of records and of the wire messages in them: another one is refused as a whole."""
MAGIC = b"SJR1"
HEAD = struct.Struct("<4sII")
MAX_META_BYTES = 256 * 1024 * 1024
SUFFIX = ".seg"

Frames = Sequence[bytes | memoryview]


class JournalError(SlipstreamError, RuntimeError, code="SLIP-JOURNAL-01"):
    """The journal cannot be used; the message names the file and says what to do."""


class JournalDamaged(JournalError, code="SLIP-JOURNAL-02"):
    """A record in the middle of the journal is not what was written."""


class Location(NamedTuple):
    """Where a record's frames are. Example: file 3, from byte 4096 on, of sizes (180, 4096)."""

    segment: int
    offset: int
    sizes: tuple[int, ...]

    @property
    def end(self) -> int:
        """Byte behind the frames: where the next record begins."""
        return self.offset + sum(self.sizes)

    @classmethod
    def of(cls, plain: Sequence[Any]) -> "Location":
        """From what msgpack made of one."""
        segment, offset, sizes = plain
        return cls(int(segment), int(offset), tuple(int(size) for size in sizes))


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it was read; its frames stay in the file."""

    kind: str
    number: int
    fields: dict[str, Any]
    location: Location


def pack(kind: str, number: int, fields: dict[str, Any], frames: Frames) -> bytes:
    """Head and meta of a record; its frames follow as they are."""
    meta = cast(bytes, msgpack.packb([kind, number, fields, [len(frame) for frame in frames]]))
    return HEAD.pack(MAGIC, len(meta), zlib.crc32(meta)) + meta


def path_of(folder: Path, segment: int) -> Path:
    return folder / f"{segment:06d}{SUFFIX}"


def path_apart(folder: Path, segment: int) -> Path:
    """Of the routing of a file's groups (replay/journal/apart.py)."""
    return folder / "routing" / f"{segment:06d}.ids"


def segments(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(p.stem) for p in folder.iterdir() if re.fullmatch(rf"\d{{6,}}{re.escape(SUFFIX)}", p.name))


def scan(file: BinaryIO, segment: int, size: int) -> Iterator[Record | int]:
    """Records of the first `size` bytes of a file in order; last comes the offset up to which they are whole, which is
    less than `size` when the rest is torn or damaged."""
    offset = 0
    while (record := read_record(file, segment, offset, size)) is not None:
        yield record
        offset = record.location.end
    yield offset


def read_record(file: BinaryIO, segment: int, offset: int, size: int) -> Record | None:
    """The record at `offset` of a file of `size` bytes, or None when there is no whole and unharmed one."""
    record = read_meta(file, segment, offset, size)
    if record is None or record.location.end > size:
        return None
    frames = read_frames(file, record.location)
    whole = not frames or bytes(frames[0][-CRC_BYTES:]) == checksum(frames[0][:-CRC_BYTES], frames[1:])
    return record if whole else None


def read_meta(file: BinaryIO, segment: int, offset: int, size: int) -> Record | None:
    """The record that begins at `offset`, whatever became of its frames; None when its head or meta is harmed."""
    file.seek(offset)
    head = file.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    magic, meta_size, crc = HEAD.unpack(head)
    start = offset + HEAD.size + meta_size
    if magic != MAGIC or meta_size > MAX_META_BYTES or start > size:
        return None
    meta = file.read(meta_size)
    if zlib.crc32(meta) != crc:
        return None
    try:
        kind, number, fields, sizes = msgpack.unpackb(meta, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):  # bytes of a frame that look like a record
        return None
    if [type(value) for value in (kind, number, fields, sizes)] != [str, int, dict, list]:
        return None
    if not all(type(frame_size) is int and frame_size >= 0 for frame_size in sizes):
        return None
    return Record(kind, number, fields, Location(segment, start, tuple(sizes)))


def read_frames(file: BinaryIO, location: Location) -> list[memoryview]:
    file.seek(location.offset)
    data = memoryview(file.read(location.end - location.offset))
    ends = itertools.accumulate(location.sizes)
    return [data[end - size : end] for size, end in zip(location.sizes, ends, strict=True)]
