"""JSONL: an object on each line, read where an index says that its line begins; zstd files are unpacked first."""

import json
import os
import weakref
from array import array
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from configs.errors import kind_of
from replay.data.cache import Entry, entry_for
from replay.data.formats.base import WHOLE_BYTES, Raw, Report, reading
from replay.data.rows import DataError, Place, RowError, shorten

ROWS_PER_LOOK = 65_536
"""Rows between two looks at the clock."""
PACKED_BYTES = 65_536
"""Of a compressed file, unpacked at a time; what they unpack to is in memory."""
UNPACKED = "rows.jsonl"
STARTS = "starts.i64"


class _Written(NamedTuple):
    """Size and time of the last change of an open file."""

    size: int
    mtime_ns: int


class JsonLines:
    """A JSONL file. Of a large one the index is kept in the cache, where later starts find it."""

    form = "JSONL"

    def __init__(
        self,
        path: Path,
        *,
        source: str,
        cache: Path | None = None,
        report: Report | None = None,
        digest: str | None = None,
        whole: bool | None = None,
    ) -> None:
        """Index a file, of `digest` where that is known already.

        Raises:
            DataError: not readable, without rows, or the cache cannot be written.
        """
        self.path, self.source = path, source
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # kept open: another file of this name is another
        except OSError as error:
            raise DataError(f"{source}: not readable: {error.strerror}") from error
        weakref.finalize(self, os.close, self._file)
        self._written = _written(self._file)
        self.is_whole = self._written.size <= WHOLE_BYTES if whole is None else whole
        self._starts: NDArray[np.int64]
        if self.is_whole:
            begins = array("q", (start for _, start, _ in _lines(path)))
            begins.append(self._written.size)
            self._starts, self._digest = np.frombuffer(begins, dtype=np.int64), digest or ""
        else:
            index = entry_for(cache, path, "index", lambda folder: _index(path, source, folder / STARTS, report))
            self._starts = np.memmap(index.folder / STARTS, dtype=np.int64, mode="r")
            self._digest = digest or str(index.meta["digest"])
        if len(self) == 0:
            raise DataError(f"{source}: has no rows; give a file with one prompt a row")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def fingerprint(self) -> str:
        if not self._digest:
            digest = blake2b(digest_size=16)
            for _, _, line in _lines(self.path):
                digest.update(line)
            self._digest = digest.hexdigest()
        return self._digest

    def raw(self, number: int) -> Raw:
        if _written(self._file) != self._written:
            raise DataError(f"{self.source}: was changed while the run reads it; put it back, and --resume the run")
        start, stop = int(self._starts[number]), int(self._starts[number + 1])
        place = Place(self.source, number + 1)
        return place, _object(os.pread(self._file, stop - start, start), place)

    def rows(self) -> Iterator[Raw]:
        return rows(self.path, self.source)


def rows(path: Path, source: str) -> Iterator[Raw]:
    """The rows of a plain or compressed file, without an index. Raises DataError."""
    lines = _lines_of_zstd(path, source) if path.suffix == ".zst" else _lines(path)

    def read(line: tuple[int, int, bytes]) -> Raw:
        place = Place(source, line[0])
        return place, _object(line[2], place)

    return map(read, lines)


def unpacked(
    path: Path, *, cache: Path | None, report: Report | None = None, source: str, whole: bool | None = None
) -> JsonLines:
    """A zstd-compressed file, unpacked into the cache. Raises DataError."""

    def make(folder: Path) -> dict[str, Any]:
        digest = blake2b(digest_size=16)
        with (folder / UNPACKED).open("wb") as out:
            for chunk in _chunks(path, source):
                digest.update(chunk)
                out.write(chunk)
        return {"digest": digest.hexdigest()}

    if report is not None:
        report(f"reading {source}")
    entry: Entry = entry_for(cache, path, "unpacked", make)
    digest = str(entry.meta["digest"])
    return JsonLines(entry.folder / UNPACKED, source=source, cache=cache, report=report, digest=digest, whole=whole)


def _chunks(path: Path, source: str) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise DataError(
            f"{source}: .zst files need zstandard; install the extra: pip install 'slipstream-rl[zstd]', or unpack it"
        ) from error
    unpacker, frame = zstandard.ZstdDecompressor(), None
    try:
        with path.open("rb") as stream:
            while packed := stream.read(PACKED_BYTES):
                while packed:  # a file may be several frames: files put together, or packed by several threads
                    frame = frame or unpacker.decompressobj()
                    yield frame.decompress(packed)
                    packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    except zstandard.ZstdError as error:
        raise DataError(f"{source}: not readable as zstd: {error}; write the file again") from error
    if frame is not None:
        raise DataError(f"{source}: ends in the middle of its data; copy or write the file again")


def _lines_of_zstd(path: Path, source: str) -> Iterator[tuple[int, int, bytes]]:
    """As `_lines`, of the unpacked file."""
    rest, number, start = b"", 0, 0
    for chunk in _chunks(path, source):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            number += 1
            if line.strip():
                yield number, start, line
            start += len(line) + 1
    if rest.strip():
        yield number + 1, start, rest


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """(line number, byte where it begins, line) of the lines with something in them."""
    start = 0
    with path.open("rb", buffering=1 << 20) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, start, line
            start += len(line)


def _index(path: Path, source: str, file: Path, report: Report | None) -> dict[str, Any]:
    """Write where each row begins, and the end; the hash of the file's bytes."""
    digest, begins, size = blake2b(digest_size=16), array("q"), path.stat().st_size
    stop = 0
    with file.open("wb") as out, reading(source, size / 1e9, "GB", report) as progress:
        for count, (_, start, line) in enumerate(_lines(path), start=1):
            begins.append(start)
            digest.update(line)  # lines that are blank are no contents
            stop = start + len(line)
            if count % ROWS_PER_LOOK == 0:
                begins.tofile(out)
                begins = array("q")
            progress.add(len(line) / 1e9)
        begins.append(stop)
        begins.tofile(out)
    return {"digest": digest.hexdigest()}


def _object(line: bytes, place: Place) -> Mapping[str, Any]:
    try:
        found = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise RowError(
            f"{place.source}: row {place.row}: not readable as JSON: {error} (value {shorten(line)}); put one JSON"
            " object on each line"
        ) from error
    if not isinstance(found, dict):
        raise RowError(
            f"{place.source}: row {place.row}: expected a JSON object, found {kind_of(found)} (value"
            f" {shorten(line)}); put one JSON object on each line"
        )
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises ValueError: a key stands there twice, of which one value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found


def _written(file: int) -> _Written:
    status = os.fstat(file)
    return _Written(status.st_size, status.st_mtime_ns)
