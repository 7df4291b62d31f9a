"""Data files: one pass that checks every row, and an index by which rows are read again when they are asked for."""

import json
import logging
import os
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast, overload

import msgpack

from replay.prompts.rows import Convention, DataError, Place, Row, detect, normalize, shorten

log = logging.getLogger(__name__)

PARQUET_MAGIC = b"PAR1"
PROGRESS_S = 5.0
"""How often a long read says how far it is."""
ROWS_PER_LOOK = 4096
"""Rows between two looks at the clock."""

Report = Callable[[str], None]
Located = tuple[int, int, dict[str, Any]]
"""Number of a row, the byte at which its line begins (JSONL; else 0), and the row as it is."""


def read_rows(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Normalised rows of a JSONL or parquet file (told apart by its first bytes), one at a time.

    The first row tells the column convention (replay/prompts/rows.py); both are logged at the end. Raises DataError: it
    names file, row (JSONL: line), column and value.
    """
    return (row for _, row in _DataFile(path))


class Rows(Sequence[Row]):
    """The rows of a file by number, and the hash of all of them.

    A row of JSONL is read again from the file each time, which must stay as it is; parquet's are kept as msgpack.
    """

    def __init__(self, path: str | os.PathLike[str], report: Report | None = None) -> None:
        """Check every row, in one pass; raises DataError as `read_rows`.

        `report` gets a sentence every few seconds, which is logged as well.
        """
        file = _DataFile(path)
        self.source = file.source
        self._kept: list[bytes] | None = [] if file.is_parquet else None
        self._starts = array("q")
        """Where each row begins, and the end of the file."""
        digest, said, count = blake2b(digest_size=16), time.monotonic(), 0
        for start, row in file:
            packed = cast(bytes, msgpack.packb(row))
            digest.update(packed)
            if self._kept is None:
                self._starts.append(start)
            else:
                self._kept.append(packed)
            if (count := count + 1) % ROWS_PER_LOOK == 0 and time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                progress = f"reading {self.source}: {count:,} rows" + file.progress(start)
                log.info("%s", progress)
                if report is not None:
                    report(progress)
        self.fingerprint = digest.hexdigest()
        assert file.convention is not None
        self._convention, self._written = file.convention, file.written
        self._starts.append(file.written[0])
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # kept open: another file of this name does not matter
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return max(0, len(self._starts) - 1) if self._kept is None else len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Raises DataError when the file was changed since it was read."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if self._kept is not None:
            return cast(Row, msgpack.unpackb(self._kept[index]))
        if _written(self._file) != self._written:
            raise DataError(f"{self.source}: was changed while the run reads it; put it back, and --resume the run")
        index = range(len(self))[index]
        start, stop = self._starts[index], self._starts[index + 1]
        raw = json.loads(os.pread(self._file, stop - start, start).decode("utf-8-sig"))
        return normalize(raw, self._convention, Place(source=self.source, row=index + 1))


class _DataFile:
    """One pass over a file; `convention` is known from its first row on."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.source, file = str(path), Path(path)
        self.convention: Convention | None = None
        if not file.is_file():
            kind = "is a folder; name one file in it" if file.is_dir() else "no such file"
            raise DataError(f"{self.source}: {kind} (data.train and data.eval take a JSONL or parquet file)")
        try:
            with file.open("rb") as stream:
                self.is_parquet = stream.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
                self.written = _written(stream.fileno())
        except OSError as error:
            raise DataError(f"{self.source}: not readable: {error.strerror}") from error
        if file.suffix == ".parquet" and not self.is_parquet:
            raise DataError(
                f"{self.source}: is not a parquet file; give JSONL files the ending .jsonl, or write it again"
            )

    def __iter__(self) -> Iterator[tuple[int, Row]]:
        """Each row with its place. Raises DataError."""
        count, first = 0, None
        numbered = _parquet_rows(self.source) if self.is_parquet else _jsonl_rows(self.source)
        for count, (number, start, raw) in enumerate(numbered, start=1):  # noqa: B007 - the last count is logged
            self.convention = self.convention or detect(raw, self.source)
            row = normalize(raw, self.convention, Place(source=self.source, row=number))
            first = first or row
            yield start, row
        if first is None or self.convention is None:
            raise DataError(f"{self.source}: has no rows; give a file with one prompt a row")
        log.info(
            "%s: %d rows, read as %s; the first one: prompt %s, ground truth %s",
            *(self.source, count, self.convention.name, shorten(first["prompt"], 300), shorten(first["ground_truth"])),
        )

    def progress(self, start: int) -> str:
        """Share of the file before this place, where places are bytes."""
        return "" if self.is_parquet else f", {start / self.written[0]:.0%}"


def _jsonl_rows(source: str) -> Iterator[Located]:
    start = 0
    with open(source, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            start, here = start + len(line), start
            if not line.strip():
                continue
            try:
                raw = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{source}: row {number}: not readable as JSON: {error} (value {shorten(line)}); put one JSON"
                    " object on each line"
                ) from error
            if not isinstance(raw, dict):
                raise DataError(
                    f"{source}: row {number}: expected a JSON object, found a {type(raw).__name__} (value"
                    f" {shorten(line)}); put one JSON object on each line"
                )
            yield number, here, raw


def _parquet_rows(source: str) -> Iterator[Located]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{source}: parquet files need pyarrow; install the extra: pip install 'slipstream-rl[parquet]', or"
            " convert the file to JSONL"
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(source) as file:
            for batch in file.iter_batches():
                for raw in batch.to_pylist():
                    number += 1
                    yield number, 0, raw
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{source}: row {number + 1}: not readable as parquet: {error}; write the file again"
        ) from error


def _written(file: int) -> tuple[int, int]:
    """Size and time of the last change of an open file."""
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns


load_rows = Rows
