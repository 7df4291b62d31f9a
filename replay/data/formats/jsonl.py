"""JSONL: an object on each line, read where an index in memory says that its line begins (8 bytes a row)."""

import json
import logging
import os
import weakref
from array import array
from collections.abc import Iterator, Mapping
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from configs.errors import kind_of
from replay.data.formats.base import Raw, Report, Table
from replay.data.rows import DataError, RowError, RowLocation, shorten
from slipstream.runtime.progress import Progress

log = logging.getLogger(__name__)


class JsonLines(Table):
    """A JSONL file; it is indexed when a row is asked for by its number."""

    form = "JSONL"

    def __init__(self, path: Path, *, whole: bool = True, report: Report | None = None) -> None:
        """Raises DataError: it cannot be opened."""
        super().__init__(str(path))
        self.is_whole, self._report = whole, report
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # kept open: another file of this name is another
        except OSError as error:
            raise DataError(f"{self.source}: not readable: {error.strerror}") from error
        weakref.finalize(self, os.close, self._file)
        self._written = self._state()

    def __len__(self) -> int:
        return len(self._index[0]) - 1

    def fingerprint(self) -> str:
        return self._index[1]

    def raw(self, number: int) -> Raw:
        starts, _ = self._index
        if self._state() != self._written:
            raise self.changed()
        place = RowLocation(self.source, number + 1)
        return place, _object(os.pread(self._file, starts[number + 1] - starts[number], starts[number]), place)

    def rows(self) -> Iterator[Raw]:
        """Without the index."""

        def read(line: tuple[int, int, bytes]) -> Raw:
            place = RowLocation(self.source, line[0])
            return place, _object(line[2], place)

        return map(read, self._lines())

    @cached_property
    def _index(self) -> "tuple[array[int], str]":
        """Where each row begins, and the end; the hash of the lines that are not blank."""
        digest, starts, stop = blake2b(digest_size=16), array("q"), 0
        with Progress(f"reading {self.source}", total=self._written[0] / 1e9, unit="GB", say=self._say) as progress:
            for _, start, line in self._lines():
                starts.append(start)
                digest.update(line)
                stop = start + len(line)
                progress.add(len(line) / 1e9)
        starts.append(stop)
        return starts, digest.hexdigest()

    def _lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(line number, byte where it begins, line) of the lines with something in them."""
        start = 0
        with open(f"/proc/self/fd/{self._file}", "rb", buffering=1 << 20) as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield number, start, line
                start += len(line)

    def _say(self, text: str) -> None:
        log.info("%s", text)
        if self._report is not None:
            self._report(text.removeprefix("progress: "))

    def _state(self) -> tuple[int, int]:
        """Size and time of the last change."""
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns


def _object(line: bytes, place: RowLocation) -> Mapping[str, Any]:
    try:
        found = json.loads(line.decode("utf-8-sig"), object_pairs_hook=_once)
        if not isinstance(found, dict):
            raise ValueError(f"expected a JSON object, found {kind_of(found)}")
    except (ValueError, RecursionError) as error:
        raise RowError(
            f"{place.source}: row {place.row}: not readable as JSON: {error} (value {shorten(line)}); put one JSON"
            " object on each line"
        ) from error
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. Raises ValueError: a key stands there twice, of which one value would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands there twice")
    return found
