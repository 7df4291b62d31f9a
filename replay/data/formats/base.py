"""What every format gives: raw rows by number, and a hash that tells whether they are the same as before."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from replay.data.rows import DataError, RowLocation

Report = Callable[[str], None]
Raw = tuple[RowLocation, Mapping[str, Any]]
"""A row as it is, and where it stands."""
ENDLESS = 2**62
"""Length of a table whose rows are made as they are asked for."""
WHOLE_BYTES = 32 * 1024**2
"""Files up to this size, shards together, are checked row by row at every start; of larger ones a sample is."""
WHOLE_ROWS = 100_000
"""The same of rows, however small they are."""


class Table(ABC):
    """Raw rows by number."""

    form: str
    """What it was read as, for the log: `JSONL`, `parquet`, ..."""
    is_whole = True
    """Whether it is small enough to be checked row by row."""

    def __init__(self, source: str) -> None:
        """`source` names it in errors and logs."""
        self.source = source

    @abstractmethod
    def __len__(self) -> int:
        """Rows; ENDLESS where there is no last one."""

    @abstractmethod
    def raw(self, number: int) -> Raw:
        """Raises DataError: it cannot be read any more; RowError: this row cannot be used."""

    def rows(self) -> Iterator[Raw]:
        """All rows from the first one on. Raises as `raw`, and goes on after a RowError."""
        return map(self.raw, range(len(self)))

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the contents. Tables with `is_whole` are hashed by their rows instead."""

    def changed(self) -> DataError:
        """What a read raises once the files are not those that were opened."""
        return DataError(f"{self.source}: was changed while the run reads it; put it back, and --resume the run")


def package(name: str, extra: str, source: str) -> ModuleType:
    """An optional package, for `source`. Raises DataError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"{source}: needs the package {name.partition('.')[0]}; install the extra: pip install"
            f" 'slipstream-rl[{extra}]', or convert the rows to JSONL"
        ) from error


def digest_of(path: Path) -> str:
    """The hash of a file's bytes."""
    digest = blake2b(digest_size=16)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
