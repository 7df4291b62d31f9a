"""Rows as they are read one after the other, and those of them that cannot be used (data.on_broken_row)."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from replay.data.rows import Place, Row, RowError

OnBroken = Literal["refuse", "skip"]
NAMED, NAMED_SKIPPED = 10, 3
"""Broken rows that a refusal names, and a warning of skipped ones."""
READ_ON = 50_000
"""Rows after the first broken one in which a refusal looks for others."""


class Reading:
    """Counts the rows of one dataset, and what is wrong with some."""

    def __init__(self, source: str, on_broken: OnBroken = "refuse") -> None:
        self.source, self.on_broken = source, on_broken
        self.num_rows = self.num_broken = 0
        self.is_whole = False
        """Whether the last row was read."""
        self._errors: list[str] = []

    def rows(
        self, raws: Iterator[tuple[Place, Mapping[str, Any]]], make: Callable[[Place, Any], Row]
    ) -> Iterator[Row | None]:
        """Each row; None for one that cannot be used and is skipped.

        Args:
            raws: goes on after a RowError, as `map` does and a generator does not.
            make: normalises a row.

        Raises:
            RowError: rows are broken, of which it names up to ten; or all are, though they may be skipped.
        """
        last = float("inf")
        while self.num_rows < last and len(self._errors) < NAMED:
            try:
                row: Row | None = make(*next(raws))
            except StopIteration:
                self.is_whole = True
                break
            except RowError as error:
                row = None
                self._broken(str(error))
                if self.on_broken == "refuse":
                    last = min(last, self.num_rows + READ_ON)
            self.num_rows += 1
            if last == float("inf"):
                yield row
        if self._errors and (self.on_broken == "refuse" or self.num_broken == self.num_rows):
            raise RowError(self._refusal())

    @property
    def skipped(self) -> str:
        """How many rows are left out, and the first of them; empty without any."""
        if not self.num_broken:
            return ""
        named = self._named(NAMED_SKIPPED)
        return (
            f"{self.source}: {self.num_broken:,} of {self.num_rows:,} rows that were read cannot be used and are never"
            f" leased (data.on_broken_row skip): {named}"
        )

    def _broken(self, error: str) -> None:
        self.num_broken += 1
        if len(self._errors) < (NAMED if self.on_broken == "refuse" else NAMED_SKIPPED):
            self._errors.append(error)

    def _named(self, most: int) -> str:
        return " | ".join(error.removeprefix(f"{self.source}: ") for error in self._errors[:most])

    def _refusal(self) -> str:
        if self.on_broken == "skip":
            return f"{self.source}: none of its {self.num_rows:,} rows can be used: {self._named(NAMED_SKIPPED)}"
        if len(self._errors) == 1:
            return self._errors[0]
        return (
            f"{self.source}: {self.num_broken} of the first {self.num_rows:,} rows cannot be used; mend or remove them,"
            f" or set data.on_broken_row skip: {self._named(NAMED)}"
        )
