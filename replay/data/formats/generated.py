"""Rows that reasoning_gym makes, without end, the same for (seed, number): `reasoning_gym:chain_sum?seed=1`.

Options are the fields of the family's configuration. `level` takes the family's curriculum at that level in all its
attributes in place of them. `form=text` gives the question
as plain text, for a model without a chat template.

Row n is row n % 500 of a dataset of its own seed, a hash of (seed, n // 500): the package draws row i of seed s as row
i - 1 of seed s + 1, so that training on seed 1 would see nearly all of an evaluation on seed 2, and some families end
at row 500.
"""

import dataclasses
import datetime
import functools
from hashlib import blake2b
from types import ModuleType
from typing import Any

from replay.data.formats.base import ENDLESS, Raw, Table, package
from replay.data.rows import DataError, RowError, RowLocation, plain
from replay.data.spec import GENERATED, Spec

CHUNK = 500
VERSION = "1"
"""Of the way from (seed, number) to a row."""
OWN = ("seed", "level", "form")
KEPT = 8
"""Datasets of one chunk each that are kept."""


class Generated(Table):
    """One family. Its rows carry what their reward makes the same entry from."""

    is_whole = False

    def __init__(self, spec: Spec) -> None:
        """Check family and options. Raises DataError: unknown, refused by the family, or the package is missing."""
        super().__init__(spec.text)
        self.family, self.form = spec.name, f"{GENERATED}'s {spec.name}"
        options = {key: value for key, value in spec.options.items() if key not in OWN}
        # As rows carry them: what these make, the reward makes again.
        self._options: dict[str, Any] = plain(options, "options", RowLocation(spec.text, 1))
        self._seed, self._level = spec.options.get("seed", 0), spec.options.get("level")
        self._as_text = spec.options.get("form", "chat") == "text"
        self._check(spec)
        self._dataset = functools.lru_cache(maxsize=KEPT)(self._make)

    def __len__(self) -> int:
        return ENDLESS

    def _levels(self) -> int:
        """Levels of the family's curriculum; 0 where it has none."""
        factory = _package(self.source).factory
        if not factory.has_curriculum(self.family):
            return 0
        attributes = factory.create_curriculum(self.family).attributes.values()
        return max((len(attribute.levels) for attribute in attributes), default=0)

    def raw(self, number: int) -> Raw:
        chunk, index = divmod(number, CHUNK)
        seed, place = self._seed_of(chunk), RowLocation(self.source, number + 1)
        try:
            entry = self._dataset(seed)[index]
        except Exception as error:  # of a hundred families: whatever one raises, this row is named
            raise RowError(f"{self.source}: row {place.row}: {type(error).__name__}: {error}") from error
        recipe = {"family": self.family, "seed": seed, "index": index, "level": self._level, "options": self._options}
        row = {"prompt" if self._as_text else "question": entry["question"], "answer": _as_answer(entry["answer"])}
        return place, row | {"extra_info": {GENERATED: recipe}, "data_source": self.family}

    def fingerprint(self) -> str:
        """Of the options, the package's version and the first row, which other versions of a family may draw anew."""
        import importlib.metadata

        text = f"{VERSION} {self.source} {importlib.metadata.version('reasoning_gym')} {self.raw(0)[1]}"
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def _make(self, seed: int) -> Any:
        return make_dataset(self.family, seed, self._level, self._options)

    def _seed_of(self, chunk: int) -> int:
        """Below 2^31, which every family takes."""
        digest = blake2b(f"{self._seed}:{chunk}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") & 0x7FFFFFFF

    def _check(self, spec: Spec) -> None:
        families = sorted(_package(self.source).factory.DATASETS)
        if self.family not in families:
            raise DataError(f"{self.source}: {GENERATED} has no family {self.family!r}; it has {', '.join(families)}")
        if type(self._seed) is not int:
            raise DataError(f"{self.source}: seed is {self._seed!r}; give an integer")
        if spec.options.get("form", "chat") not in ("chat", "text"):
            raise DataError(f"{self.source}: form is {spec.options['form']!r}; take chat or text")
        level, levels = self._level, self._levels()
        if level is not None and not (type(level) is int and 0 <= level < levels):
            hint = f"take 0 to {levels - 1}" if levels else "this family has no curriculum; leave it out"
            raise DataError(f"{self.source}: level is {level!r}; {hint}")
        try:
            self._make(0)
        except Exception as error:  # of a hundred families: whatever one raises, the run does not begin
            raise DataError(f"{self.source}: the family refuses this: {type(error).__name__}: {error}") from error


def make_dataset(family: str, seed: int, level: int | None, options: dict[str, Any]) -> Any:
    """A dataset of reasoning_gym, of CHUNK rows. Raises what the family raises for options that it refuses."""
    factory = _package(family).factory
    options = _with_dates(factory.DATASETS[family][1], options)
    if level is None:
        return factory.create_dataset(family, seed=seed, size=CHUNK, **options)
    curriculum = factory.create_curriculum(family)
    for name, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
    configuration = curriculum.generate_configuration({**options, "seed": seed, "size": CHUNK})
    taken = [key for key, value in options.items() if getattr(configuration, key) != value]
    if taken:
        raise ValueError(f"{taken[0]} follows from the level; leave it out")
    return factory.DATASETS[family][0](config=configuration)


def _with_dates(configuration: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Rows carry dates and times as ISO text; families that have such fields compare with them. Raises ValueError."""
    defaults = {field.name: field.default for field in dataclasses.fields(configuration)}
    kinds = {key: type(one) for key, one in defaults.items() if isinstance(one, (datetime.date, datetime.time))}
    return {
        key: kinds[key].fromisoformat(value) if key in kinds and isinstance(value, str) else value
        for key, value in options.items()
    }


def _as_answer(answer: Any) -> Any:
    return answer if answer is None or isinstance(answer, (str, int, float)) else str(answer)


def _package(source: str) -> ModuleType:
    return package(GENERATED, "reasoning-gym", source)
