"""What every format gives: raw rows by number, and a hash that tells whether they are the same as before."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from replay.data.rows import Place
from slipstream.runtime.progress import Progress

log = logging.getLogger(__name__)
Report = Callable[[str], None]
Raw = tuple[Place, Mapping[str, Any]]
"""A row as it is, and where it stands."""
ENDLESS = 2**62
"""Length of a table whose rows are made as they are asked for."""
WHOLE_BYTES = 32 * 1024**2
"""Files up to this size, shards together, are checked row by row at every start; of larger ones a sample is."""
WHOLE_ROWS = 20_000
"""The same for tables that are no files."""


def reading(source: str, total: float, unit: str, report: Report | None) -> Progress:
    """The progress of a long read, in the log, and to `report`."""

    def say(text: str) -> None:
        log.info("%s", text)
        if report is not None:
            report(text.removeprefix("progress: "))

    return Progress(f"reading {source}", total=total, unit=unit, say=say)


class Table(Protocol):
    """Raw rows by number. Reading a row takes memory for that row."""

    source: str
    """Names it in errors and logs."""
    form: str
    """What it was read as, for the log: `JSONL`, `parquet`, ..."""
    is_whole: bool
    """Whether it is small enough to be checked row by row."""

    def __len__(self) -> int:
        """Rows; ENDLESS where there is no last one."""

    def raw(self, number: int) -> Raw:
        """Raises DataError: it cannot be read any more; RowError: this row cannot be used."""

    def rows(self) -> Iterator[Raw]:
        """All rows from the first one on. Raises as `raw`, and goes on after a RowError."""

    def fingerprint(self) -> str:
        """A hash of the contents. Tables with `is_whole` are hashed by their rows instead."""
