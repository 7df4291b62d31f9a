"""Parquet: small files are held as Arrow tables; large ones become memory-mapped Arrow files in the cache."""

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from replay.data.cache import entry_for
from replay.data.formats.base import WHOLE_BYTES, Raw, Report, reading
from replay.data.rows import DataError, Place

ROWS_PER_BATCH = 4096
ROWS = "rows.arrow"
WHOLE_PARQUET_ROWS = 100_000
"""More rows than this are many, however well they are compressed."""


class Parquet:
    """A parquet file, by number of row. A row group decoded for one row would take longer than the row's answers."""

    form = "parquet"

    def __init__(
        self, path: Path, *, cache: Path | None = None, report: Report | None = None, whole: bool | None = None
    ) -> None:
        """Read or map it. Raises DataError: not readable, without rows, or the cache cannot be written."""
        self.source = str(path)
        self._path = path
        is_small = path.stat().st_size <= WHOLE_BYTES if whole is None else whole
        if not (num_rows := _num_rows(path, self.source)):
            raise DataError(f"{self.source}: has no rows; give a file with one prompt a row")
        self.is_whole = is_small and num_rows <= WHOLE_PARQUET_ROWS
        self._batch: Callable[[int], Any]
        if self.is_whole:
            batches = list(_batches(path, self.source))
            sizes, self._batch, self._digest = [len(batch) for batch in batches], batches.__getitem__, ""
        else:
            made = entry_for(cache, path, "arrow", lambda folder: _convert(path, self.source, folder / ROWS, report))
            sizes, self._digest = made.meta["sizes"], str(made.meta["digest"])
            self._batch = _mapped(made.folder / ROWS)
        self._stops = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._stops[-1]

    def fingerprint(self) -> str:
        self._digest = self._digest or digest_of(self._path)
        return self._digest

    def raw(self, number: int) -> Raw:
        at = bisect.bisect_right(self._stops, number)
        batch = self._batch(at)
        within = number - (self._stops[at] - len(batch))
        return Place(self.source, number + 1), batch.slice(within, 1).to_pylist()[0]

    def rows(self) -> Iterator[Raw]:
        return rows(self._path, self.source)


def rows(path: Path, source: str) -> Iterator[Raw]:
    """The rows of a file, in order. Raises DataError."""
    number = 0
    for batch in _batches(path, source):
        for raw in batch.to_pylist():
            number += 1
            yield Place(source, number), raw


def _num_rows(path: Path, source: str) -> int:
    with _opened(path, source) as file:
        return int(file.metadata.num_rows)


def _batches(path: Path, source: str) -> Iterator[Any]:
    with _opened(path, source) as file:
        yield from file.iter_batches(ROWS_PER_BATCH)


@contextlib.contextmanager
def _opened(path: Path, source: str) -> Iterator[Any]:
    """A parquet file. Raises DataError, also for what is found out while it is read."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(
            f"{source}: parquet files need pyarrow; install the extra: pip install 'slipstream-rl[parquet]', or"
            " convert the file to JSONL"
        ) from error
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise DataError(f"{source}: has two columns {twice!r}; remove one")
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{source}: not readable as parquet: {error}; write the file again") from error


def _convert(path: Path, source: str, file: Path, report: Report | None) -> dict[str, Any]:
    """Write the rows as an Arrow file; the sizes of its batches, and the hash of the parquet file."""
    from pyarrow import ipc

    sizes, writer = list[int](), None
    try:
        with reading(source, _num_rows(path, source), "rows", report) as progress:
            for batch in _batches(path, source):
                writer = writer or ipc.new_file(str(file), batch.schema)
                writer.write_batch(batch)
                sizes.append(len(batch))
                progress.add(len(batch))
    finally:
        if writer is not None:
            writer.close()
    return {"sizes": sizes, "digest": digest_of(path)}


def digest_of(path: Path) -> str:
    """The hash of a file's bytes."""
    digest = blake2b(digest_size=16)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _mapped(file: Path) -> Callable[[int], Any]:
    """Record batches of a memory-mapped Arrow file by number."""
    import pyarrow

    reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(file)))
    get: Callable[[int], Any] = reader.get_batch
    return get
