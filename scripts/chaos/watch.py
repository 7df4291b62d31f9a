"""A run seen from outside: its journal as it grows, its checkpoints, what its producers note down."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.chaos.journal import Tail


@dataclass(slots=True)
class Producer:
    """What the witness in one rollout server has written (scripts/chaos/producer.py)."""

    events: Path
    live: int = -1
    """Newest version that it asked for leases with."""
    acks: int = 0
    broadcasts: int = 0
    _offset: int = 0

    @property
    def hold(self) -> Path:
        """While this exists, its next broadcast is held."""
        return self.events.with_suffix(".hold")

    def poll(self) -> None:
        """Read new lines."""
        if not self.events.exists():
            return
        with self.events.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._note(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "live":
                self.live = event["version"]
            case "ack":
                self.acks += 1
            case "broadcast":
                self.broadcasts += 1


@dataclass(slots=True)
class Watch:
    """Poll it often; its fields say where the run is. `archive` keeps every journal file, also those replay deletes."""

    folder: Path
    archive: Path
    producers: dict[str, Producer]
    version: int = 0
    """Last committed step of the newest incarnation's line."""
    high: int = 0
    """Highest step that was ever committed."""
    taken: int = 0
    """Step of the newest batch."""
    incarnation: int = 0
    boots: int = 0
    records: int = 0
    _tail: Tail = field(init=False)

    def __post_init__(self) -> None:
        self.archive.mkdir(parents=True, exist_ok=True)
        self._tail = Tail(self.archive)

    def poll(self) -> None:
        """Take in what is new."""
        for path in (self.folder / "journal").glob("*.seg"):
            with suppress(FileExistsError, FileNotFoundError):
                os.link(path, self.archive / path.name)  # the same file: it grows here as it grows there
        for record in self._tail.poll():
            self.records += 1
            self._note(record.kind, record.fields)
        for producer in self.producers.values():
            producer.poll()

    def _note(self, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "boot":
                self.boots += 1
            case "learner":
                self.incarnation, self.version, self.taken = fields["incarnation"], fields["version"], fields["version"]
            case "take":
                self.taken = fields["step"]
            case "commit":
                self.version = fields["step"]
                self.high = max(self.high, self.version)

    @property
    def batch_is_formed(self) -> bool:
        """A batch was handed out and its step is not committed."""
        return self.taken == self.version + 1

    @property
    def newest_is_live(self) -> bool:
        """Some server has the last committed version."""
        return any(producer.live >= self.version for producer in self.producers.values())

    @property
    def is_repeating(self) -> bool:
        """The learner has come back and has not yet repeated all journalled steps."""
        return self.version < self.high

    @property
    def steps_to_repeat(self) -> int:
        """Steps that a learner would repeat if it died now."""
        complete = [int(path.parent.name.removeprefix("step_")) for path in self._checkpoints("*/COMPLETE")]
        return self.version - max(complete, default=0)

    @property
    def writes_checkpoint(self) -> bool:
        """A checkpoint folder of a step above all complete ones is there without its mark."""
        return any(not (path / "COMPLETE").exists() and self._is_new(path) for path in self._checkpoints("step_*"))

    def _is_new(self, path: Path) -> bool:
        return int(path.name.removeprefix("step_")) >= self.version

    def _checkpoints(self, pattern: str) -> list[Path]:
        return list((self.folder / "checkpoints").glob(pattern))
