"""Rows in columns: parquet files, held as Arrow tables, and datasets of `datasets`, which are memory-mapped."""

import contextlib
from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from replay.data.formats.base import WHOLE_ROWS, Raw, Table, digest_of, package
from replay.data.rows import DataError, RowLocation
from replay.data.spec import HUB, Spec

ROWS_PER_BATCH = 4096
MARKS = ("dataset_info.json", "dataset_dict.json")
"""Files that tell a folder of `save_to_disk` from one of data files."""
SPLIT = "train"


class Parquet(Table):
    """A parquet file (extra `parquet`); it is read whole when a row is asked for by its number."""

    form = "parquet"

    def __init__(self, path: Path, *, whole: bool = True) -> None:
        """Raises DataError: not readable, or pyarrow is not installed."""
        super().__init__(str(path))
        self._path = path
        with self._opened() as file:
            self._size = int(file.metadata.num_rows)
        self.is_whole = whole and self._size <= WHOLE_ROWS

    def __len__(self) -> int:
        return self._size

    def raw(self, number: int) -> Raw:
        return RowLocation(self.source, number + 1), self._table.slice(number, 1).to_pylist()[0]

    def rows(self) -> Iterator[Raw]:
        """A part of the file at a time."""
        number = 0
        with self._opened() as file:
            for batch in file.iter_batches(ROWS_PER_BATCH):
                for number, raw in enumerate(batch.to_pylist(), start=number + 1):  # noqa: B020
                    yield RowLocation(self.source, number), raw

    def fingerprint(self) -> str:
        return digest_of(self._path)

    @cached_property
    def _table(self) -> Any:
        with self._opened() as file:
            return file.read()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Any]:
        """The file. Raises DataError, also for what is found out while it is read."""
        pyarrow, parquet = (package(name, "parquet", self.source) for name in ("pyarrow", "pyarrow.parquet"))
        try:
            with parquet.ParquetFile(self._path) as file:
                names = file.schema_arrow.names
                if twice := next((name for name in names if names.count(name) > 1), None):
                    raise DataError(f"{self.source}: has two columns {twice!r}; remove one")
                yield file
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{self.source}: not readable as parquet: {error}; write the file again") from error


def is_saved(path: Path) -> bool:
    """Whether `datasets` has written this folder."""
    return (path / MARKS[1]).is_file() or ((path / MARKS[0]).is_file() and (path / "state.json").is_file())


class Saved(Table):
    """One split of a dataset: a folder of `save_to_disk`, or a name of a hub (extra `datasets`).

    Options: `split`; for a name of a hub also `name` (the configuration) and `revision`.
    """

    form = "a dataset of Hugging Face datasets"

    def __init__(self, spec: Spec) -> None:
        """Open it. Raises DataError: not there, no such split, an unknown option, or `datasets` is not installed."""
        super().__init__(spec.text)
        self._label, self._rows = Path(spec.name).name, _load(spec)
        self.is_whole = len(self._rows) <= WHOLE_ROWS
        self._files = [Path(file["filename"]) for file in self._rows.cache_files]
        self._written = self._state()

    def __len__(self) -> int:
        return len(self._rows)

    def raw(self, number: int) -> Raw:
        # Saving a dataset again writes over the files that are mapped, so the rows in memory are the new ones.
        if self._state() != self._written:
            raise self.changed()
        return RowLocation(self.source, number + 1, self._label), self._rows[number]

    def fingerprint(self) -> str:
        """Of the Arrow files, and of the rows that are selected of them."""
        digest = blake2b("".join(map(digest_of, self._files)).encode(), digest_size=16)
        if self._rows._indices is not None or not self._files:
            digest.update(str(self._rows._fingerprint).encode())
        return digest.hexdigest()

    def _state(self) -> list[tuple[int, int, int]]:
        """(inode, size, time of the last change) of each file that is mapped; nothing of one that is gone."""
        found = (file.stat() for file in self._files if file.exists())
        return [(status.st_ino, status.st_size, status.st_mtime_ns) for status in found]


def _load(spec: Spec) -> Any:
    datasets = package("datasets", "datasets", spec.text)
    datasets.disable_progress_bars()
    options = dict(spec.options)
    split = str(options.pop("split", SPLIT))
    known = {"name", "revision"} if spec.kind == HUB else set()
    if unknown := sorted(set(options) - known):
        raise DataError(f"{spec.text}: unknown option {unknown[0]!r}; take {', '.join(sorted({'split', *known}))}")
    try:
        if spec.kind == HUB:
            found = datasets.load_dataset(spec.name, split=split, **options)
        else:
            found = datasets.load_from_disk(str(Path(spec.name).expanduser()))
    except (OSError, ValueError) as error:  # what the package and the client of the hub raise
        hint = "give a hub's name that can be reached from here" if spec.kind == HUB else "save the dataset again"
        raise DataError(f"{spec.text}: cannot be loaded: {str(error)[:300]}; {hint}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise DataError(f"{spec.text}: has no split {split!r}; add ?split= with one of {', '.join(found)}")
        return found[split]
    return found
