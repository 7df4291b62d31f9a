"""A journal of another run, to be read only: what `--replay` trains from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replay.journal.format import Frames, Location, Record
from replay.journal.reader import JournalReader
from replay.messages import EvaluationResult, Group


class PlayedJournal:
    """Implements `Journal`; nothing is written."""

    def __init__(self, folder: Path) -> None:
        self._reader = JournalReader(folder)
        self.segment = 1
        self.size_bytes = 0

    def records(self) -> Iterator[Record]:
        """All records, from the first file on. Raises JournalError."""
        return self._reader.records()

    def append(self, kind: str, fields: dict[str, Any], frames: Frames = ()) -> Location:
        """Not kept."""
        return Location(self.segment, 0, ())

    def flush(self) -> None:
        """Nothing to do."""

    def read(self, location: Location) -> Group | EvaluationResult:
        """See `Journal.read`."""
        return self._reader.read(location)

    def begin_segment(self) -> None:
        """Nothing to do."""

    def release(self, first: int) -> None:
        """Nothing to do: the journal is another run's."""

    def want_sync(self) -> None:
        """Nothing to do."""
