"""A journal that forgets everything with its process: for simulations, and for a service without a run folder."""

from typing import Any

from replay.channel.frames import decode
from replay.journal.format import OLDEST_SCHEMA, Frames, Location, Record
from replay.messages import TO_REPLAY, EvaluationResult, Group


class MemoryJournal:
    """Implements `Journal`; a simulated crash takes `records` and starts anew from them."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.segment = 1
        self.size_bytes = 0
        self.released = 0
        self._frames: dict[tuple[int, int], list[bytes]] = {}

    def append(self, kind: str, fields: dict[str, Any], frames: Frames = ()) -> Location:
        """See `Journal.append`."""
        location = Location(self.segment, len(self.records), tuple(len(frame) for frame in frames))
        self.records.append(Record(kind, len(self.records) + 1, fields, location))
        self.size_bytes += sum(location.sizes)
        if frames:
            self._frames[location.segment, location.offset] = [bytes(frame) for frame in frames]
        return location

    def flush(self) -> None:
        """See `Journal.flush`."""

    def read(self, location: Location) -> Group | EvaluationResult:
        """See `Journal.read`."""
        assert location.segment >= self.released, "a released file is read"
        message = decode(
            self._frames[location.segment, location.offset], TO_REPLAY, oldest_schema=OLDEST_SCHEMA
        ).message
        assert isinstance(message, (Group, EvaluationResult))
        return message

    def begin_segment(self) -> None:
        """See `Journal.begin_segment`."""
        self.segment += 1

    def release(self, first: int) -> None:
        """See `Journal.release`."""
        self.released = first
        self._frames = {place: frames for place, frames in self._frames.items() if place[0] >= first}

    def want_sync(self) -> None:
        """See `Journal.want_sync`."""
