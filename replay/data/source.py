"""Walks the rows of one or several datasets pass by pass, in an order that can be resumed."""

import hashlib
import logging
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

from configs.schema import Config
from replay.data.dataset import Reading, Rows, read_rows
from replay.data.formats.base import Report
from replay.data.order import PASS_RATE, Walk, WeightedRows, walk_of
from replay.data.rows import DataError, Row

log = logging.getLogger(__name__)
STATE_SCHEMA = 2
SETTINGS = {
    "rows": "data.train (number of rows)",
    "fingerprint": "data.train (hash of the contents)",
    "shuffle": "data.shuffle",
    "seed": "run.seed",
    "order": "data.train (weights) and data.curriculum",
    "beside": "learner.sft.data (hash of the contents)",
}
"""What a state must have in common with the source that goes on from it, and how the user calls it."""
ENDLESS_PASS = 4096
"""What counts as a pass over rows without end, where a whole pass of drops ends the run."""


class PromptSource:
    """Hands out rows; each pass over a dataset covers every row of it exactly once. Not thread-safe.

    Of several datasets, the one that is furthest behind its share comes next, so that none is ever ahead of it by a
    whole prompt. A prompt's index is its row's number times the number of datasets, plus its dataset's.
    """

    def __init__(
        self, rows: Sequence[Row] | Sequence[WeightedRows], *, shuffle: bool, seed: int, curriculum: str = "none"
    ) -> None:
        """Raises DataError: no rows, weights that are missing, or the curriculum does not fit."""
        if not rows:
            raise DataError("a prompt source needs at least one row")
        parts = _parts(rows)
        self.walks = [walk_of(part, curriculum, shuffle=shuffle, seed=seed) for part in parts]
        self.shuffle, self.seed, self.curriculum = shuffle, seed, curriculum
        self.is_rated = curriculum == PASS_RATE
        """Whether the order depends on `scored`."""
        self.seconds = 0.0
        """Spent reading rows."""
        self.beside: PromptSource | None = None
        """Rows of learner.sft."""
        first = self.walks[0]
        self.fingerprint = first.fingerprint
        if len(self.walks) > 1:
            _check_weights(parts, self.walks)
            text = " ".join(f"{walk.name}={walk.fingerprint}" for walk in self.walks)
            self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        """Prompts of a pass over all datasets; of those without end, ENDLESS_PASS."""
        return sum(ENDLESS_PASS if walk.is_endless else walk.size for walk in self.walks)

    def next(self) -> tuple[int, int, Row]:
        """The next prompt as (pass, prompt index, row); the first two are its group id."""
        walk = self._next_walk()
        pass_, index = self.peek()
        walk.advance()
        return pass_, index, self.row(index)

    def peek(self) -> tuple[int, int]:
        """(pass, prompt index) of what `next` gives next."""
        walk = self._next_walk()
        pass_, number = walk.peek()
        return pass_, number * len(self.walks) + self.walks.index(walk)

    def row(self, index: int) -> Row:
        """The row of a prompt index. Raises DataError: there is no such row, or its file was changed."""
        number, which = divmod(index, len(self.walks))
        walk = self.walks[which]
        if not 0 <= number < walk.size:
            raise DataError(f"prompt index {index}: the dataset has {len(self)} rows")
        started = time.perf_counter()
        row = walk.row(number)
        self.seconds += time.perf_counter() - started
        return row

    def begin_at(self, drawn: int) -> None:
        """Go on, of one dataset, behind so many of its rows."""
        if self.walks[0].drawn != drawn:
            self.walks[0].restore({"drawn": drawn})

    def scored(self, index: int, rate: float) -> None:
        """A group of this prompt is here, with this share of right answers."""
        number, which = divmod(index, len(self.walks))
        self.walks[which].scored(number, rate)

    def measured(self) -> dict[str, float]:
        """Numbers for metrics.jsonl: rows handed out of each of several datasets."""
        return {f"prompts/drawn/{walk.name}": float(walk.drawn) for walk in self.walks if len(self.walks) > 1}

    def state(self) -> dict[str, Any]:
        """Position and identity of the data, in types that JSON and msgpack carry; see `restore`."""
        shares = [f"{walk.name}:{walk.weight:g}" for walk in self.walks] if len(self.walks) > 1 else []
        return {
            "schema": STATE_SCHEMA,
            "rows": len(self),
            "fingerprint": self.fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "order": ", ".join([*shares, f"curriculum {self.curriculum}"]),
            "walks": [walk.state() for walk in self.walks],
        } | ({} if self.beside is None else {"beside": self.beside.fingerprint})

    def restore(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken.

        Raises DataError: the state belongs to other data or another order, or is broken; nothing has changed then.
        """
        mine = self.state()
        if state.get("schema") != STATE_SCHEMA:
            raise DataError(f"prompt state of schema {state.get('schema')!r}, this version reads {STATE_SCHEMA}")
        for key, setting in SETTINGS.items():
            if state.get(key) != mine.get(key):
                raise DataError(
                    f"{setting}: the run was {state.get(key)!r} and is now {mine.get(key)!r}, so its prompts cannot be"
                    " continued without losing or repeating some; go back to what it was, or start a new run"
                )
        before = [walk.state() for walk in self.walks]
        try:
            for walk, given in zip(self.walks, state["walks"], strict=True):
                walk.restore(given)
        except (DataError, KeyError, TypeError, ValueError) as error:
            for walk, own in zip(self.walks, before, strict=True):
                walk.restore(own)
            raise DataError(f"prompt state is broken: {error}") from error

    def _next_walk(self) -> Walk:
        """The dataset that is furthest behind its share; of several, the first."""
        if len(self.walks) == 1:
            return self.walks[0]
        count, whole = sum(walk.drawn for walk in self.walks) + 1, sum(walk.weight for walk in self.walks)
        return max(self.walks, key=lambda walk: count * walk.weight / whole - walk.drawn)


def prompt_source(config: Config, report: Report | None = None) -> PromptSource:
    """The prompts of data.train in their order. Raises DataError."""
    data, answers = config.data, config.learner.facts.answers
    parts = [
        WeightedRows(name, Rows(one.path, report, on_broken=data.on_broken_row, answers=answers), one.weight)
        for name, one in data.train_sets.items()
    ]
    source = PromptSource(parts, shuffle=data.shuffle, seed=config.run.seed, curriculum=data.curriculum)
    if (path := config.learner.sft.data) is not None:
        rows = Rows(path, report, on_broken=data.on_broken_row, answers=1)
        source.beside = PromptSource(rows, shuffle=data.shuffle, seed=config.run.seed)
    return source


def evaluation_rows(config: Config) -> dict[str, list[Row]]:
    """The first usable prompts of each evaluation set; nothing without evaluations. Raises DataError."""
    found = {}
    for one in config.evaluation_sets:
        reading = Reading(one.path, config.data.on_broken_row)
        found[one.name] = list(islice(read_rows(one.path, reading=reading), one.num_prompts))
        if reading.skipped:
            log.warning("%s", reading.skipped)
    return found


def _parts(rows: Sequence[Row] | Sequence[WeightedRows]) -> list[WeightedRows]:
    """One dataset is a part without a name. Endless rows are not walked through to find out."""
    if not isinstance(rows, Rows) and isinstance(rows[0], WeightedRows):
        return cast(list[WeightedRows], list(rows))
    return [WeightedRows("", cast(Sequence[Row], rows))]


def _check_weights(parts: Sequence[WeightedRows], walks: Sequence[Walk]) -> None:
    without = [part.name for part in parts if part.weight is None]
    endless = [walk.name for walk in walks if walk.is_endless]
    if without and endless:
        said = f"has no weight, and {endless[0]} has rows without end; give every dataset a weight"
        raise DataError(f"data.train.{without[0]}: {said}")


def stream_seed(seed: int, a: int, b: int) -> int:
    """A random stream of its own for each prompt of each pass, below 2^31."""
    mixed = (seed * 0x9E3779B97F4A7C15 + a * 0xBF58476D1CE4E5B9 + b * 0x94D049BB133111EB + 1) & ((1 << 64) - 1)
    mixed ^= mixed >> 31
    return (mixed * 0xD6E8FEB86659FD93 & ((1 << 64) - 1)) >> 33
