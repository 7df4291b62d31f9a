"""One dataset and the order in which its rows are asked, pass by pass; it resumes exactly from its state.

| curriculum          | a pass goes                                                                        |
|---------------------|------------------------------------------------------------------------------------|
| `none`              | shuffled, or as the file has the rows                                              |
| a column            | from its smallest to its largest value                                             |
| `pass_rate`         | from rows that some answers solved, or none was scored of, to solved or hopeless ones |
"""

import base64
import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from replay.data.dataset import Rows, broken
from replay.data.rows import DataError, Row, RowError
from slipstream.runtime.progress import Progress

PASS_RATE = "pass_rate"
RATED_ROWS = 1 << 22
"""Most rows of a dataset whose pass rates are kept: a byte each, in every snapshot and checkpoint."""
UNRATED, FULL = 255, 200
"""Values of a pass rate in a byte: none yet, and 1.0."""
Indices = Sequence[int] | NDArray[np.int64]
"""Row numbers in the order of a pass."""


class WeightedRows(NamedTuple):
    """A dataset and its share of the prompts: `weight` of the sum of all weights, None for its number of rows."""

    name: str
    rows: Sequence[Row]
    weight: float | None = None


class Walk:
    """One dataset, shuffled or as it is: its whole future is given by (seed, pass) and `drawn`."""

    def __init__(self, part: WeightedRows, *, shuffle: bool, seed: int) -> None:
        self.name, self.rows, self.shuffle, self.seed = part.name, part.rows, shuffle, seed
        self.size, self.is_endless = len(part.rows), isinstance(part.rows, Rows) and part.rows.is_endless
        self.weight = float(self.size) if part.weight is None else part.weight
        self.fingerprint = part.rows.fingerprint if isinstance(part.rows, Rows) else _fingerprint(part.rows)
        self.drawn = 0
        """Rows that were handed out."""
        self._indices = self._order(0)

    def peek(self) -> tuple[int, int]:
        """(pass, row) of what comes next."""
        pass_, offset = divmod(self.drawn, self.size)
        return pass_, int(self._indices[offset])

    def advance(self) -> None:
        """What `peek` gave is handed out."""
        self.drawn += 1
        if self.drawn % self.size == 0:
            self._end_pass()
            self._indices = self._order(self.drawn // self.size)

    def row(self, index: int) -> Row:
        """A row, or what stands for one that cannot be used. Raises DataError: the file was changed."""
        try:
            return self.rows[index]
        except RowError as error:
            return broken(error)

    def scored(self, index: int, rate: float) -> None:
        """A group came back with this share of right answers."""

    def state(self) -> dict[str, Any]:
        """What the order depends on beside (seed, pass), in types that JSON and msgpack carry."""
        return {"drawn": self.drawn}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave. Raises KeyError, TypeError, ValueError: broken."""
        drawn = state["drawn"]
        if type(drawn) is not int or drawn < 0:
            raise ValueError(f"{drawn!r} rows handed out of {self.name!r}")
        self.drawn = drawn
        self._indices = self._order(drawn // self.size)

    def _end_pass(self) -> None:
        """The order of the next pass is asked for."""

    def _order(self, pass_: int) -> Indices:
        """The order of a pass, which covers every row exactly once."""
        if not self.shuffle or self.is_endless:
            return range(self.size)
        return np.argsort(self._shuffled(pass_))

    def _shuffled(self, pass_: int) -> NDArray[np.uint64]:
        """[rows] distinct numbers: outputs of SplitMix64 (Steele, Lea, Flood 2014), keyed by (seed, pass).

        The generators of numpy and of the standard library may change between versions, and a resumed run must not.
        """
        positions = np.arange(self.size, dtype=np.uint64)
        if not self.shuffle:
            return positions
        with np.errstate(over="ignore"):
            z = np.uint64(_key(self.seed, pass_)) + positions * np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return np.asarray(z ^ (z >> np.uint64(31)))


class ByColumn(Walk):
    """Every pass from the smallest value of a column to the largest, shuffled among equal ones."""

    def __init__(self, part: WeightedRows, column: str, *, shuffle: bool, seed: int) -> None:
        self._values = column_of(part.rows, column, part.rows.source if isinstance(part.rows, Rows) else "")
        super().__init__(part, shuffle=shuffle, seed=seed)

    def _order(self, pass_: int) -> Indices:
        return np.lexsort((self._shuffled(pass_), self._values))


class ByPassRate(Walk):
    """The first pass is shuffled; a later one begins with rows whose last groups promise the largest spread.

    An answer that is right with probability p has a reward of variance p(1 - p), which is what a group is learned from.
    Rows without a score (their groups were dropped, or are still on the way) count as p = 1/2.
    """

    def __init__(self, part: WeightedRows, *, shuffle: bool, seed: int) -> None:
        if (size := len(part.rows)) > RATED_ROWS:
            raise DataError(
                f"data.curriculum: pass_rate keeps a byte for each of {size:,} rows in every checkpoint, at most"
                f" {RATED_ROWS:,}; take data.curriculum none, or a column of the data"
            )
        self._rates = np.full(size, UNRATED, dtype=np.uint8)
        self._used = self._rates.copy()
        """Rates when the pass began."""
        super().__init__(part, shuffle=shuffle, seed=seed)

    def scored(self, index: int, rate: float) -> None:
        self._rates[index] = round(rate * FULL)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "rates": _packed(self._rates), "used": _packed(self._used)}

    def restore(self, state: dict[str, Any]) -> None:
        self._rates, self._used = (_unpacked(state[name], self.size) for name in ("rates", "used"))
        super().restore(state)

    def _end_pass(self) -> None:
        self._used = self._rates.copy()

    def _order(self, pass_: int) -> Indices:
        rates = np.where(self._used == UNRATED, 0.5, self._used / FULL)
        return np.lexsort((self._shuffled(pass_), -rates * (1 - rates)))


def walk_of(part: WeightedRows, curriculum: str, *, shuffle: bool, seed: int) -> Walk:
    """A dataset in the order of a curriculum. Raises DataError: it does not fit the data."""
    if curriculum == "none":
        return Walk(part, shuffle=shuffle, seed=seed)
    if isinstance(part.rows, Rows) and part.rows.is_endless:
        raise DataError(
            f"data.curriculum: {curriculum!r}: rows of {part.rows.source} are made without end and never come again, so"
            " they cannot be sorted; set data.curriculum none"
        )
    if curriculum == PASS_RATE:
        return ByPassRate(part, shuffle=shuffle, seed=seed)
    return ByColumn(part, curriculum, shuffle=shuffle, seed=seed)


def _fingerprint(rows: Sequence[Row]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(cast(bytes, msgpack.packb(row)))
    return digest.hexdigest()


def _key(seed: int, pass_: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{pass_}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _packed(values: NDArray[np.uint8]) -> str:
    return base64.b64encode(zlib.compress(values.tobytes(), 6)).decode("ascii")


def _unpacked(text: str, size: int) -> NDArray[np.uint8]:
    unpacker = zlib.decompressobj()
    try:
        found = np.frombuffer(unpacker.decompress(base64.b64decode(text), size + 1), dtype=np.uint8).copy()
    except zlib.error as error:
        raise ValueError(f"pass rates: {error}") from error
    if len(found) != size:
        raise ValueError(f"pass rates of {len(found)} rows, the dataset has {size}")
    return found


def column_of(rows: Sequence[Row], column: str, source: str = "") -> NDArray[np.float64]:
    """[rows] values of a column, or of a key of extra_info. Raises DataError: a row has no number there.

    Rows that are skipped come last.
    """
    values = np.empty(len(rows), dtype=np.float64)
    with Progress(f"{source}: sorting by {column!r}", total=len(rows), unit="rows") as progress:
        for number in range(len(rows)):
            progress.add(1)
            try:
                row = rows[number]
            except RowError:
                if not getattr(rows, "skips_broken", False):
                    raise
                values[number] = np.inf
                continue
            value = row["columns"].get(column, row["extra_info"].get(column))
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                of = f"{source}: " if source else ""
                raise DataError(
                    f"data.curriculum: {column!r}: {of}row {number + 1} has {value!r} there; give every row a number,"
                    " as a column or a key of extra_info, or set data.curriculum none"
                )
            values[number] = value
    return values
