"""Datasets in, prompts out: reads JSONL or parquet, and walks the rows pass by pass in an order that can be resumed."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from replay.prompts.rows import DataError, Place, Row, detect, normalize, shorten

__all__ = ["DataError", "PromptSource", "Row", "load_rows", "read_rows"]

logger = logging.getLogger(__name__)
PARQUET_MAGIC = b"PAR1"
STATE_SCHEMA = 1


def load_rows(path: str | os.PathLike[str]) -> list[Row]:
    """All rows of a file; see `read_rows`."""
    return list(read_rows(path))


def read_rows(path: str | os.PathLike[str]) -> Iterator[Row]:
    """Read a JSONL or parquet file (told apart by its first bytes), one normalised row at a time.

    The column convention is detected from the first row, see replay/prompts/rows.py; both are logged at the end.

    Raises:
        DataError: the file cannot be read or a row cannot be used; names file, row (JSONL: line), column and value.
    """
    source, file = str(path), Path(path)
    if not file.is_file():
        kind = "is a folder; name one file in it" if file.is_dir() else "no such file"
        raise DataError(f"{source}: {kind} (data.train and data.eval take a JSONL or parquet file)")
    try:
        with file.open("rb") as stream:
            is_parquet = stream.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError as error:
        raise DataError(f"{source}: not readable: {error.strerror}") from error
    if file.suffix == ".parquet" and not is_parquet:
        raise DataError(f"{source}: is not a parquet file; give JSONL files the ending .jsonl, or write it again")
    numbered = _parquet_rows(source) if is_parquet else _jsonl_rows(source)
    convention, first, count = None, None, 0
    for count, (number, raw) in enumerate(numbered, start=1):  # noqa: B007 - counts for the line at the end
        convention = convention or detect(raw, source)
        row = normalize(raw, convention, Place(source=source, row=number))
        first = first or row
        yield row
    if convention is None or first is None:
        raise DataError(f"{source}: has no rows; give a file with one prompt a row")
    logger.info(
        "%s: %d rows, read as %s; the first one: prompt %s, ground truth %s",
        *(source, count, convention.name, shorten(first["prompt"], 300), shorten(first["ground_truth"])),
    )


def _jsonl_rows(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(source, "rb") as stream:
        for number, line in enumerate(stream, start=1):
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
            yield number, raw


def _parquet_rows(source: str) -> Iterator[tuple[int, dict[str, Any]]]:
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
                    yield number, raw
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{source}: row {number + 1}: not readable as parquet: {error}; write the file again"
        ) from error


@dataclass(frozen=True, slots=True)
class _Position:
    """The next row to hand out: the `offset`-th of pass `pass_`."""

    pass_: int
    offset: int


class PromptSource:
    """Hands out the rows, pass after pass; each pass covers every row exactly once.

    The order of pass p depends on (seed, p) alone, so the whole future is given by the position, and `state` is
    small. Not thread-safe; no I/O.
    """

    def __init__(self, rows: Sequence[Row], *, shuffle: bool, seed: int) -> None:
        if not rows:
            raise DataError("a prompt source needs at least one row")
        self.rows = rows
        self.shuffle = shuffle
        self.seed = seed
        self.fingerprint = _fingerprint(rows)
        self._position = _Position(0, 0)
        self._order = self._order_of(0)

    def __len__(self) -> int:
        """Rows in one pass."""
        return len(self.rows)

    def next(self) -> tuple[int, int, Row]:
        """The next prompt as (pass, prompt index, row); the first two are its group id."""
        at = self._position
        index = int(self._order[at.offset])
        if at.offset + 1 < len(self.rows):
            self._position = _Position(at.pass_, at.offset + 1)
        else:
            self._position = _Position(at.pass_ + 1, 0)
            self._order = self._order_of(at.pass_ + 1)
        return at.pass_, index, self.rows[index]

    def row(self, index: int) -> Row:
        """The row of a prompt index.

        Raises:
            DataError: there is no such row.
        """
        if not 0 <= index < len(self.rows):
            raise DataError(f"prompt index {index}: the dataset has {len(self.rows)} rows")
        return self.rows[index]

    def state(self) -> dict[str, Any]:
        """Position and identity of the dataset, in types that JSON and msgpack carry; see `restore`."""
        return {
            "schema": STATE_SCHEMA,
            "pass": self._position.pass_,
            "offset": self._position.offset,
            "rows": len(self.rows),
            "fingerprint": self.fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken.

        Raises:
            DataError: the state belongs to another dataset or order, or is broken; nothing has changed then.
        """
        if state.get("schema") != STATE_SCHEMA:
            raise DataError(f"prompt state of schema {state.get('schema')!r}, this version reads {STATE_SCHEMA}")
        mine = self.state()
        for key, setting in {
            "rows": "data.train (number of rows)",
            "fingerprint": "data.train (hash of the contents)",
            "shuffle": "data.shuffle",
            "seed": "run.seed",
        }.items():
            if state.get(key) != mine[key]:
                raise DataError(
                    f"{setting}: the run was {state.get(key)!r} and is now {mine[key]!r}, so its prompts cannot be"
                    " continued without losing or repeating some; go back to what it was, or start a new run"
                )
        pass_, offset = state.get("pass"), state.get("offset")
        if type(pass_) is not int or type(offset) is not int or pass_ < 0 or not 0 <= offset < len(self.rows):
            raise DataError(f"prompt state is broken: pass {pass_!r}, offset {offset!r} of {len(self.rows)} rows")
        self._position = _Position(pass_, offset)
        self._order = self._order_of(pass_)

    def _order_of(self, pass_: int) -> NDArray[np.int64]:
        """[rows] prompt indices in the order of a pass.

        Sorts by SplitMix64 outputs (Steele, Lea, Flood 2014), which are distinct, keyed by (seed, pass). The
        generators of numpy and of the standard library may change between versions, and a resumed run must not.
        """
        positions = np.arange(len(self.rows), dtype=np.uint64)
        if not self.shuffle:
            return positions.astype(np.int64)
        key = hashlib.blake2b(f"{self.seed}:{pass_}".encode(), digest_size=8).digest()
        with np.errstate(over="ignore"):
            z = np.frombuffer(key, dtype="<u8") + positions * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return np.argsort(z ^ (z >> np.uint64(31)))


def _fingerprint(rows: Sequence[Row]) -> str:
    """Hash of all rows in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(cast(bytes, msgpack.packb(row)))
    return digest.hexdigest()
