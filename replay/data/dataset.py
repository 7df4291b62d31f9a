"""The rows of a dataset by number, normalised and checked, whatever format and columns they come in."""

import logging
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast, overload

import msgpack

from replay.data.formats import ENDLESS, first_rows, open_table
from replay.data.formats.base import Report, Table
from replay.data.formats.generated import Generated
from replay.data.pictures import row_of
from replay.data.reading import OnBroken, Reading
from replay.data.rows import Convention, DataError, Place, Row, RowError, detect, shorten
from replay.data.spec import parse

log = logging.getLogger(__name__)

SAMPLED = 2048
"""Rows of a large dataset that are checked when it is opened, spread evenly, the first and the last among them."""
SAMPLED_ENDLESS = 8
BROKEN = "broken"
"""Key of a row that cannot be used; its value says why."""


def read_rows(text: str, report: Report | None = None, reading: Reading | None = None) -> Iterator[Row]:
    """Normalised rows of a dataset from the first one on, without an index, so at once.

    The first row tells the column convention (replay/data/rows.py), of which `report` gets a sentence. Rows that
    cannot be used are left out or refused, as `reading` has it (by default they are refused). Raises DataError: it
    names file, rows (JSONL: lines), column and value.
    """
    reading = reading or Reading(str(text))
    normalise = _Normaliser(str(text), reading.on_broken)
    is_first = True
    for row in reading.rows(first_rows(str(text)), normalise):
        if row is None:
            continue
        if is_first and report is not None:
            report(f"{text}: read as {normalise.name}; the first row: {_shown(row, 120)}")
        is_first = False
        yield row
    if is_first:
        raise DataError(f"{text}: has no rows; give a file with one prompt a row")


class _Normaliser:
    """Makes rows of raw ones, in the convention of the first that has one."""

    def __init__(self, text: str, on_broken: OnBroken) -> None:
        self._suffix, self._on_broken = parse(text).suffix, on_broken
        self._convention: Convention | None = None

    @property
    def name(self) -> str:
        return "" if self._convention is None else self._convention.name

    def __call__(self, place: Place, raw: Any) -> Row:
        """Raises DataError: the first row has no convention; RowError: this row cannot be used."""
        if self._convention is None:
            try:
                self._convention = detect(raw, place.source)
            except DataError as error:
                if self._on_broken == "refuse":
                    raise
                raise place.error("prompt", sorted(raw), "missing") from error
        return with_suffix(row_of(raw, self._convention, place), self._suffix)


class Rows(Sequence[Row]):
    """Rows by number, and the hash of all of them. What is kept in memory does not grow with a large dataset."""

    def __init__(
        self,
        text: str | Path,
        report: Report | None = None,
        *,
        cache: Path | None = None,
        on_broken: OnBroken = "refuse",
    ) -> None:
        """Open a dataset; check every row of a small one, and a sample of a large one.

        Args:
            text: see replay/data/spec.py.
            report: gets a sentence every few seconds of a long read, which is logged as well.
            cache: data.cache; None takes the default.
            on_broken: data.on_broken_row; rows that are skipped keep their numbers.

        Raises:
            DataError: as `read_rows`; or the cache cannot be written.
        """
        table: Table = open_table(str(text), cache=cache, report=report)
        self.source, self.table = table.source, table
        self._suffix, self._row = parse(str(text)).suffix, _Normaliser(str(text), on_broken)
        self.skips_broken = on_broken == "skip"
        reading, self._first = Reading(self.source, on_broken), dict[str, Any]()
        checked = self._check_all(reading) if table.is_whole else self._check_some(reading)
        if reading.skipped:
            log.warning("%s", reading.skipped)
        how = f"{len(self):,} rows" if not self.is_endless else "rows without end"
        log.info(
            "%s: %s of %s, read as %s, %s checked; the first one: %s",
            *(self.source, how, table.form, self._row.name, checked, _shown(self._first, 300)),
        )

    @property
    def is_endless(self) -> bool:
        """Whether rows are made as they are asked for."""
        return len(self.table) == ENDLESS

    def num_levels(self) -> int:
        """Levels of difficulty that rows may be asked for in; 0 for none. Raises DataError: the lowest is refused."""
        return self.table.usable_levels() if isinstance(self.table, Generated) else 0

    @property
    def first_level(self) -> int:
        return (self.table.first_level or 0) if isinstance(self.table, Generated) else 0

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        """Raises DataError: the file was changed since it was opened; RowError: this row cannot be used."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._row(*self.table.raw(range(len(self))[index]))

    def at_level(self, number: int, level: int) -> Row:
        """A row at a level of difficulty. Raises as `__getitem__`."""
        assert isinstance(self.table, Generated)
        return self._row(*self.table.at_level(number, level))

    def _check_all(self, reading: Reading) -> str:
        digest = blake2b(digest_size=16)
        for row in reading.rows(self.table.rows(), self._row):
            self._first = self._first or row or {}
            digest.update(cast(bytes, msgpack.packb(row)))
        self.fingerprint = digest.hexdigest()
        return "all"

    def _check_some(self, reading: Reading) -> str:
        last = len(self) - 1
        numbers = range(SAMPLED_ENDLESS)
        if not self.is_endless:
            numbers = sorted({last * part // (SAMPLED - 1) for part in range(SAMPLED)})  # type: ignore[assignment]
        for row in reading.rows(map(self.table.raw, numbers), self._row):
            self._first = self._first or row or {}
        self.fingerprint = self.table.fingerprint()
        if self._suffix:
            self.fingerprint = blake2b(f"{self.fingerprint} {self._suffix}".encode(), digest_size=16).hexdigest()
        return f"{len(numbers):,}"


load_rows = Rows


def with_suffix(row: Row, suffix: str) -> Row:
    """The row with text behind its prompt, in the last message of a chat; a blank parts them."""
    if not suffix:
        return row
    suffix = suffix if suffix[0].isspace() else f" {suffix}"
    if isinstance(row["prompt"], str):
        return {**row, "prompt": row["prompt"] + suffix}
    *before, last = row["prompt"]
    content = last["content"]
    longer = content + suffix if isinstance(content, str) else [*content, {"type": "text", "text": suffix}]
    return {**row, "prompt": [*before, {**last, "content": longer}]}


def _shown(row: Row, limit: int) -> str:
    return f"prompt {shorten(row['prompt'], limit)}, ground truth {shorten(row['ground_truth'])}"


def broken(error: RowError) -> Row:
    """What stands for a row that cannot be used: it is dropped when its turn comes, and counted."""
    return {"prompt": "", "ground_truth": None, "data_source": "", "extra_info": {}, "columns": {}, BROKEN: str(error)}
