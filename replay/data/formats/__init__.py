"""What rows may be read from, a file for each form; `open_table` chooses."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from replay.data.formats.arrow import Parquet, Saved, is_saved
from replay.data.formats.base import ENDLESS as ENDLESS
from replay.data.formats.base import WHOLE_BYTES, Raw, Report, Table
from replay.data.formats.custom import Custom
from replay.data.formats.generated import Generated
from replay.data.formats.jsonl import JsonLines
from replay.data.formats.taskset import Tasks
from replay.data.rows import DataError
from replay.data.spec import CUSTOM, FILES, GENERATED, HUB, TASKSET, Spec, files_of, parse

PARQUET_MAGIC, ZSTD_MAGIC = b"PAR1", b"\x28\xb5\x2f\xfd"
ENDINGS = (".jsonl", ".parquet")
"""Of the files that are taken from a folder."""
KINDS: dict[str, type[Generated | Tasks | Custom | Saved]] = {
    GENERATED: Generated,
    TASKSET: Tasks,
    CUSTOM: Custom,
    HUB: Saved,
}


def open_table(text: str, report: Report | None = None) -> Table:
    """The rows that a value of data.train names.

    Args:
        text: see replay/data/spec.py.
        report: gets a sentence every few seconds of a long read.

    Raises:
        DataError: nothing is there, or it cannot be read as what it seems to be.
    """
    spec = parse(text)
    if spec.kind in KINDS or is_saved(Path(spec.name).expanduser()):
        return KINDS.get(spec.kind, Saved)(spec)
    files = _files(spec)
    whole = sum(file.stat().st_size for file in files) <= WHOLE_BYTES
    tables: list[Table] = [
        Parquet(file, whole=whole) if _is_parquet(file) else JsonLines(file, whole=whole, report=report)
        for file in files
    ]
    return tables[0] if len(tables) == 1 else Shards(text, tables)


def size_of_files(text: str) -> int | None:
    """Bytes of the files that a value names, as they are on the disk; None of what is no file of rows."""
    spec = parse(text)
    if spec.kind != FILES or is_saved(Path(spec.name).expanduser()):
        return None
    return sum(file.stat().st_size for file in _files(spec))


def _files(spec: Spec) -> list[Path]:
    if spec.options:
        raise DataError(f"{spec.text}: files take no option but suffix; leave out {', '.join(spec.options)}")
    return files_of(spec, ENDINGS)


def _is_parquet(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            begin = stream.read(len(PARQUET_MAGIC))
    except OSError as error:
        raise DataError(f"{file}: not readable: {error.strerror}") from error
    if begin == ZSTD_MAGIC:
        raise DataError(f"{file}: is compressed; unpack it (zstd -d), or save it as a dataset of `datasets`")
    if file.suffix == ".parquet" and begin != PARQUET_MAGIC:
        raise DataError(f"{file}: is not a parquet file; give JSONL files the ending .jsonl, or write it again")
    return begin == PARQUET_MAGIC


class Shards(Table):
    """Several files, one after the other."""

    def __init__(self, source: str, tables: Sequence[Table]) -> None:
        super().__init__(source)
        self._tables = tables
        self.form = f"{len(tables)} files of {' and '.join(dict.fromkeys(table.form for table in tables))}"
        self.is_whole = all(table.is_whole for table in tables)
        self._stops: list[int] = []

    def __len__(self) -> int:
        self._stops = self._stops or list(itertools.accumulate(len(table) for table in self._tables))
        return self._stops[-1]

    def raw(self, number: int) -> Raw:
        at = bisect.bisect_right(self._stops, number) if len(self) else 0
        return self._tables[at].raw(number - (self._stops[at - 1] if at else 0))

    def rows(self) -> Iterator[Raw]:
        return itertools.chain.from_iterable(table.rows() for table in self._tables)

    def fingerprint(self) -> str:
        """The files' hashes in their order; their names and places do not matter."""
        return blake2b(" ".join(table.fingerprint() for table in self._tables).encode(), digest_size=16).hexdigest()
