"""Hugging Face datasets: folders of `save_to_disk`, and names of a hub; memory-mapped by the `datasets` package."""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from replay.data.cache import entry_for
from replay.data.formats.base import WHOLE_ROWS, Raw
from replay.data.formats.columns import digest_of
from replay.data.rows import DataError, Place
from replay.data.spec import HUB, Spec

MARKS = ("dataset_info.json", "dataset_dict.json")
"""Files that tell a folder of `save_to_disk` from one of data files."""
SPLIT = "train"


def is_saved(path: Path) -> bool:
    """Whether `datasets` has written this folder."""
    return (path / MARKS[1]).is_file() or ((path / MARKS[0]).is_file() and (path / "state.json").is_file())


class Saved:
    """One split of a dataset. Options: `split`; for a name of a hub also `name` (the configuration) and `revision`."""

    def __init__(self, spec: Spec, *, cache: Path | None = None) -> None:
        """Open it. Raises DataError: not there, no such split, an unknown option, or `datasets` is not installed."""
        self.source, self.form = spec.text, "a dataset of Hugging Face datasets"
        self._label = Path(spec.name).name
        self._cache = cache
        self._rows = _load(spec)
        self.is_whole = len(self._rows) <= WHOLE_ROWS
        if not len(self._rows):
            raise DataError(f"{self.source}: has no rows; give a split with one prompt a row")
        self._files = [Path(file["filename"]) for file in self._rows.cache_files]
        self._written = _written(self._files)

    def __len__(self) -> int:
        return len(self._rows)

    def raw(self, number: int) -> Raw:
        # Saving a dataset again writes over the files that are mapped, so the rows in memory are the new ones.
        if _written(self._files) != self._written:
            raise DataError(f"{self.source}: was changed while the run reads it; put it back, and --resume the run")
        return Place(self.source, number + 1, self._label), self._rows[number]

    def rows(self) -> Iterator[Raw]:
        return map(self.raw, range(len(self)))

    def fingerprint(self) -> str:
        """Of the Arrow files, each read once and remembered in the cache, and of the rows that are selected of them."""
        digest = blake2b(digest_size=16)
        for file in self._files:
            entry = entry_for(self._cache, file, "digest", lambda _, file=file: {"digest": digest_of(file)})  # type: ignore[misc]
            digest.update(entry.meta["digest"].encode())
        if self._rows._indices is not None or not self._files:
            digest.update(str(self._rows._fingerprint).encode())
        return digest.hexdigest()


def _written(files: list[Path]) -> list[tuple[int, int, int]]:
    """(inode, size, time of the last change) of each file that is mapped; nothing of one that is gone."""
    return [(s.st_ino, s.st_size, s.st_mtime_ns) for s in (file.stat() for file in files if file.exists())]


def _load(spec: Spec) -> Any:
    datasets = _package(spec)
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


def _package(spec: Spec) -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"{spec.text}: saved datasets and hub names need the package datasets; install the extra: pip install"
            " 'slipstream-rl[datasets]', or write the rows as parquet"
        ) from error
    datasets.disable_progress_bars()
    module: ModuleType = datasets
    return module
