"""Walks the rows of a dataset pass by pass, in an order that can be resumed."""

import hashlib
from collections.abc import Sequence
from typing import Any, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from replay.prompts.files import Rows
from replay.prompts.rows import DataError, Row

STATE_SCHEMA = 1
SETTINGS = {
    "rows": "data.train (number of rows)",
    "fingerprint": "data.train (hash of the contents)",
    "shuffle": "data.shuffle",
    "seed": "run.seed",
}
"""What a state must have in common with the source that goes on from it, and how the user calls it."""


class PromptSource:
    """Hands out the rows, pass after pass; each pass covers every row exactly once. Not thread-safe.

    The order of pass p depends on (seed, p) alone, so the whole future is given by the position, and `state` is small.
    """

    def __init__(self, rows: Sequence[Row], *, shuffle: bool, seed: int) -> None:
        if not rows:
            raise DataError("a prompt source needs at least one row")
        self.rows, self.shuffle, self.seed = rows, shuffle, seed
        self.fingerprint = rows.fingerprint if isinstance(rows, Rows) else _fingerprint(rows)
        self._pass, self._offset, self._order = 0, 0, self._order_of(0)

    def __len__(self) -> int:
        return len(self.rows)

    def next(self) -> tuple[int, int, Row]:
        """The next prompt as (pass, prompt index, row); the first two are its group id."""
        pass_, index = self.peek()
        self._offset += 1
        if self._offset == len(self.rows):
            self._pass, self._offset, self._order = pass_ + 1, 0, self._order_of(pass_ + 1)
        return pass_, index, self.rows[index]

    def peek(self) -> tuple[int, int]:
        """(pass, prompt index) of what `next` gives next."""
        return self._pass, int(self._order[self._offset])

    def row(self, index: int) -> Row:
        """The row of a prompt index. Raises DataError: there is no such row."""
        if not 0 <= index < len(self.rows):
            raise DataError(f"prompt index {index}: the dataset has {len(self.rows)} rows")
        return self.rows[index]

    def state(self) -> dict[str, Any]:
        """Position and identity of the dataset, in types that JSON and msgpack carry; see `restore`."""
        return {
            "schema": STATE_SCHEMA,
            "pass": self._pass,
            "offset": self._offset,
            "rows": len(self.rows),
            "fingerprint": self.fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken.

        Raises DataError: the state belongs to another dataset or order, or is broken; nothing has changed then.
        """
        if state.get("schema") != STATE_SCHEMA:
            raise DataError(f"prompt state of schema {state.get('schema')!r}, this version reads {STATE_SCHEMA}")
        mine = self.state()
        for key, setting in SETTINGS.items():
            if state.get(key) != mine[key]:
                raise DataError(
                    f"{setting}: the run was {state.get(key)!r} and is now {mine[key]!r}, so its prompts cannot be"
                    " continued without losing or repeating some; go back to what it was, or start a new run"
                )
        pass_, offset = state.get("pass"), state.get("offset")
        if type(pass_) is not int or type(offset) is not int or pass_ < 0 or not 0 <= offset < len(self.rows):
            raise DataError(f"prompt state is broken: pass {pass_!r}, offset {offset!r} of {len(self.rows)} rows")
        self._pass, self._offset, self._order = pass_, offset, self._order_of(pass_)

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
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(cast(bytes, msgpack.packb(row)))
    return digest.hexdigest()


def stream_seed(seed: int, a: int, b: int) -> int:
    """A random stream of its own for each prompt of each pass, below 2^31."""
    mixed = (seed * 0x9E3779B97F4A7C15 + a * 0xBF58476D1CE4E5B9 + b * 0x94D049BB133111EB + 1) & ((1 << 64) - 1)
    mixed ^= mixed >> 31
    return (mixed * 0xD6E8FEB86659FD93 & ((1 << 64) - 1)) >> 33
