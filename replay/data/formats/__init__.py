"""What rows may be read from, a file for each form; `open_table` chooses."""

import bisect
import itertools
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

from replay.data.formats import columns, jsonl
from replay.data.formats.base import ENDLESS as ENDLESS
from replay.data.formats.base import WHOLE_BYTES, Raw, Report, Table
from replay.data.formats.custom import Custom
from replay.data.formats.generated import Generated
from replay.data.formats.saved import Saved, is_saved
from replay.data.formats.taskset import Tasks
from replay.data.rows import DataError
from replay.data.spec import CUSTOM, FILES, GENERATED, HUB, TASKSET, Spec, files_of, parse

PARQUET_MAGIC = b"PAR1"
ENDINGS = (".jsonl", ".jsonl.zst", ".parquet")
"""Of the files that are taken from a folder."""


def open_table(text: str, *, cache: Path | None = None, report: Report | None = None) -> Table:
    """The rows that a value of data.train names, by number.

    Args:
        text: see replay/data/spec.py.
        cache: data.cache; None takes the default.
        report: gets a sentence every few seconds of a long read.

    Raises:
        DataError: nothing is there, or it cannot be read as what it seems to be.
    """
    spec = parse(text)
    if (other := _of_another_kind(spec, cache)) is not None:
        return other
    files = _files(spec)
    whole = sum(file.stat().st_size for file in files) <= WHOLE_BYTES
    tables: list[Table] = []
    for file in files:
        if _is_parquet(file):
            tables.append(columns.Parquet(file, cache=cache, report=report, whole=whole))
        elif file.suffix == ".zst":
            tables.append(jsonl.unpacked(file, cache=cache, report=report, source=str(file), whole=whole and None))
        else:
            tables.append(jsonl.JsonLines(file, source=str(file), cache=cache, report=report, whole=whole))
    return tables[0] if len(tables) == 1 else Shards(text, tables)


def first_rows(text: str) -> Iterator[Raw]:
    """The rows from the first one on, without an index, so at once. Raises as `open_table`."""
    spec = parse(text)
    if (other := _of_another_kind(spec, None)) is not None:
        return other.rows()
    return itertools.chain.from_iterable(
        (columns.rows if _is_parquet(file) else jsonl.rows)(file, str(file)) for file in _files(spec)
    )


def size_of_files(text: str) -> int | None:
    """Bytes of the files that a value names, as they are on the disk; None of what is no file of rows."""
    spec = parse(text)
    if spec.kind != FILES or is_saved(Path(spec.name).expanduser()):
        return None
    return sum(file.stat().st_size for file in _files(spec))


def _of_another_kind(spec: Spec, cache: Path | None) -> Table | None:
    if spec.kind == GENERATED:
        return Generated(spec)
    if spec.kind == TASKSET:
        return Tasks(spec)
    if spec.kind == CUSTOM:
        return Custom(spec)
    if spec.kind == HUB or is_saved(Path(spec.name).expanduser()):
        return Saved(spec, cache=cache)
    return None


def _files(spec: Spec) -> list[Path]:
    if spec.options:
        raise DataError(f"{spec.text}: files take no option but suffix; leave out {', '.join(spec.options)}")
    return files_of(spec, ENDINGS)


def _is_parquet(file: Path) -> bool:
    try:
        with file.open("rb") as stream:
            found = stream.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError as error:
        raise DataError(f"{file}: not readable: {error.strerror}") from error
    if file.suffix == ".parquet" and not found:
        raise DataError(f"{file}: is not a parquet file; give JSONL files the ending .jsonl, or write it again")
    return found


class Shards:
    """Several files, one after the other."""

    def __init__(self, source: str, tables: Sequence[Table]) -> None:
        self.source, self._tables = source, tables
        self._stops = list(itertools.accumulate(len(table) for table in tables))
        forms = dict.fromkeys(table.form for table in tables)
        self.form = f"{len(tables)} files of {' and '.join(forms)}"
        self.is_whole = all(table.is_whole for table in tables)

    def __len__(self) -> int:
        return self._stops[-1]

    def raw(self, number: int) -> Raw:
        at = bisect.bisect_right(self._stops, number)
        return self._tables[at].raw(number - (self._stops[at - 1] if at else 0))

    def rows(self) -> Iterator[Raw]:
        return itertools.chain.from_iterable(table.rows() for table in self._tables)

    def fingerprint(self) -> str:
        """The files' hashes in their order; their names and places do not matter."""
        return blake2b(" ".join(table.fingerprint() for table in self._tables).encode(), digest_size=16).hexdigest()
