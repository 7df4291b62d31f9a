"""The rows of a dataset by number, normalised and checked, whatever format and columns they come in."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, cast, overload

import msgpack

from replay.data.conventions import Convention, detect
from replay.data.formats import ENDLESS, open_table
from replay.data.formats.base import Raw, Report
from replay.data.pictures import row_of
from replay.data.rows import DataError, Row, RowError, shorten
from replay.data.spec import parse
from replay.data.taught import form_of, taught_row

log = logging.getLogger(__name__)

OnBroken = Literal["refuse", "skip"]
SAMPLED = 2048
"""Rows of a large dataset that are checked when it is opened, spread evenly, the first and the last among them."""
SAMPLED_ENDLESS = 8
NAMED, NAMED_SKIPPED = 10, 3
"""Broken rows that a refusal names, and a warning of skipped ones."""
READ_ON = 50_000
"""Rows after the first broken one in which a refusal looks for others."""
BROKEN = "broken"
"""Key of a row that cannot be used; its value says why."""


class Reading:
    """Makes rows of raw ones, in the convention of the first; counts them, and what is wrong with some."""

    def __init__(self, text: str, on_broken: OnBroken = "refuse", answers: int = 0) -> None:
        """With `answers` rows hold so many of them (replay/data/taught.py). Raises DataError."""
        self.source, self.on_broken, self._answers = text, on_broken, answers
        self.num_rows = self.num_broken = 0
        self.is_whole = False
        """Whether the last row was read."""
        self.convention: Convention | tuple[str, ...] | None = None
        """Of the first row; of one with answers, their columns."""
        self.suffix = parse(text).suffix
        if answers and self.suffix:
            raise DataError(f"{text}: ?suffix= follows prompts that are sampled from; leave it out")
        self._errors: list[str] = []

    def row(self, raw: Raw) -> Row:
        """One row. Raises DataError: the first row has no convention; RowError: this row cannot be used."""
        place, columns = raw
        if self.convention is None:
            try:
                self.convention = (
                    form_of(columns, place.source, self._answers) if self._answers else detect(columns, place.source)
                )
            except DataError as error:
                if self.on_broken == "refuse":
                    raise
                raise place.error("prompt", sorted(columns), "missing") from error
        if isinstance(self.convention, Convention):
            return _with_suffix(row_of(columns, self.convention, place), self.suffix)
        return taught_row(columns, self.convention, place)

    def rows(self, raws: Iterator[Raw]) -> Iterator[Row | None]:
        """Each row; None for one that cannot be used and is skipped.

        `raws` goes on after a RowError, as `map` does and a generator does not. Raises RowError: rows are broken, of
        which it names up to ten; or all are, though they may be skipped.
        """
        last = float("inf")
        while self.num_rows < last and len(self._errors) < NAMED:
            try:
                row: Row | None = self.row(next(raws))
            except StopIteration:
                self.is_whole = True
                break
            except RowError as error:
                row = None
                self.num_broken += 1
                if self.on_broken == "refuse":
                    last = min(last, self.num_rows + READ_ON)
                if self.on_broken == "refuse" or len(self._errors) < NAMED_SKIPPED:
                    self._errors.append(str(error))
            self.num_rows += 1
            if last == float("inf"):
                yield row
        if self._errors and (self.on_broken == "refuse" or self.num_broken == self.num_rows):
            raise RowError(self._refusal())

    @property
    def form(self) -> str:
        """How rows are read, in words."""
        known = self.convention
        return known.name if isinstance(known, Convention) else " and ".join(known or ())

    @property
    def skipped(self) -> str:
        """How many rows are left out, and the first of them; empty without any."""
        if not self.num_broken:
            return ""
        return (
            f"{self.source}: {self.num_broken:,} of {self.num_rows:,} rows that were read cannot be used and are never"
            f" leased (data.on_broken_row skip): {self._named}"
        )

    @property
    def _named(self) -> str:
        return " | ".join(error.removeprefix(f"{self.source}: ") for error in self._errors)

    def _refusal(self) -> str:
        if self.on_broken == "skip":
            return f"{self.source}: none of its {self.num_rows:,} rows can be used: {self._named}"
        if len(self._errors) == 1:
            return self._errors[0]
        return (
            f"{self.source}: {self.num_broken} of the first {self.num_rows:,} rows cannot be used; mend or remove them,"
            f" or set data.on_broken_row skip: {self._named}"
        )


def read_rows(text: str, report: Report | None = None, reading: Reading | None = None) -> Iterator[Row]:
    """Normalised rows of a dataset from the first one on, without an index, so at once.

    The first row tells the column convention, of which `report` gets a sentence. Rows that cannot be used are left out
    or refused, as `reading` has it (by default they are refused). Raises DataError: it names file, rows (JSONL: lines),
    column and value.
    """
    reading = reading or Reading(str(text))
    is_first = True
    for row in reading.rows(open_table(str(text)).rows()):
        if row is None:
            continue
        if is_first and report is not None and reading.convention is not None:
            report(f"{text}: read as {reading.form}; the first row: {_shown(row, 120)}")
        is_first = False
        yield row
    if is_first:
        raise DataError(f"{text}: has no rows; give a file with one prompt a row")


class Rows(Sequence[Row]):
    """Rows by number, and the hash of all of them."""

    def __init__(
        self,
        text: str | Path,
        report: Report | None = None,
        *,
        on_broken: OnBroken = "refuse",
        answers: int = 0,
    ) -> None:
        """Open a dataset; check every row of a small one, and a sample of a large one.

        Args:
            text: see replay/data/spec.py.
            report: gets a sentence every few seconds of a long read, which is logged as well.
            on_broken: data.on_broken_row; rows that are skipped keep their numbers.
            answers: that a row holds; 0 of prompts.

        Raises:
            DataError: as `read_rows`.
        """
        self.table = table = open_table(str(text), report)
        self.source, self.skips_broken = table.source, on_broken == "skip"
        self._reading, self._first = Reading(str(text), on_broken, answers), dict[str, Any]()
        self.is_endless = (size := len(table)) == ENDLESS
        """Whether rows are made as they are asked for."""
        if not size:
            raise DataError(f"{self.source}: has no rows; give a file with one prompt a row")
        if table.is_whole:
            digest = blake2b(digest_size=16)
            for row in self._checked(table.rows()):
                digest.update(cast(bytes, msgpack.packb(row)))
            self.fingerprint = digest.hexdigest()
        else:
            some = {(size - 1) * part // (SAMPLED - 1) for part in range(SAMPLED)}
            numbers: Iterable[int] = range(SAMPLED_ENDLESS) if self.is_endless else sorted(some)
            for _ in self._checked(map(table.raw, numbers)):
                pass
            self.fingerprint = table.fingerprint()
            if self._reading.suffix:
                said = f"{self.fingerprint} {self._reading.suffix}"
                self.fingerprint = blake2b(said.encode(), digest_size=16).hexdigest()
        how = "rows without end" if self.is_endless else f"{size:,} rows"
        log.info(
            "%s: %s of %s, read as %s, %s checked; the first one: %s",
            *(
                self.source,
                how,
                table.form,
                self._reading.form,
                f"{self._reading.num_rows:,}",
                _shown(self._first, 300),
            ),
        )

    def _checked(self, raws: Iterator[Raw]) -> Iterator[Row | None]:
        for row in self._reading.rows(raws):
            self._first = self._first or row or {}
            yield row
        if self._reading.skipped:
            log.warning("%s", self._reading.skipped)

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
        return self._reading.row(self.table.raw(range(len(self))[index]))


load_rows = Rows


def _with_suffix(row: Row, suffix: str) -> Row:
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
