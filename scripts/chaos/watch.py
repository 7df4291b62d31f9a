"""A run seen from outside: its journal as it grows, its checkpoints, its logs, its probes and their gates."""

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from scripts.chaos.checker.history import History
from scripts.chaos.checker.journal import Tail
from scripts.chaos.polling import JsonLines, replace_text

CLASSES = ("closed", "silent", "slow", "corrupt", "full", "duplicate")
"""The symptom classes, which stand in brackets in a log line."""
CLASS = re.compile(rf"\[({'|'.join(CLASSES)})\]")
GATE_POLL_S = 0.002
SPOIL = "spoil"
"""Moment behind a receiver's middle bucket: when it is aimed at, a bit of the bucket flips."""


class Gate:
    """Holds the process that it is in at a moment that the harness has aimed at.

    A folder of files: `aim` names a moment and the longest wait there; a process that reaches it writes `at`, and goes
    on when `aim` is gone.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._aim, self._at = folder, folder / "aim", folder / "at"

    def reach(self, moment: str) -> bool:
        """Wait here if the harness has aimed at this moment; whether it has."""
        with suppress(FileNotFoundError):
            limit, aimed = self._aim.read_text(encoding="utf-8").split(" ", 1)
            if aimed == moment:
                self._at.touch()
                until = time.monotonic() + float(limit)
                while self._aim.exists() and time.monotonic() < until:
                    time.sleep(GATE_POLL_S)
                return True
        return False

    def aim(self, moment: str, limit_s: float) -> None:
        self._at.unlink(missing_ok=True)
        replace_text(self._aim, f"{limit_s} {moment}")

    def release(self) -> None:
        self._aim.unlink(missing_ok=True)

    @property
    def arrived(self) -> bool:
        return self._at.exists()


class Probe(JsonLines):
    """The harness's end of a probe (scripts/chaos/probe.py): its record and its gate."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "events.jsonl")
        self.gate, self.live = Gate(folder), -1  # newest version that leases were asked for with

    def poll(self) -> list[dict[str, Any]]:
        new = super().poll()
        self.live = next((event["version"] for event in reversed(new) if event["event"] == "live"), self.live)
        return new

    def first(self, event: str, version: int = -1) -> dict[str, Any] | None:
        """The first event of a kind, of this version or a later one."""
        return next((e for e in self.events if e["event"] == event and e.get("version", -1) >= version), None)


class Watch:
    """Where a run is. `archive` keeps every file of the journal, also those that replay deletes."""

    def __init__(self, folder: Path, archive: Path) -> None:
        archive.mkdir(parents=True, exist_ok=True)
        self.folder, self.archive, self.history, self._tail = folder, archive, History(), Tail(archive)
        self.probes: dict[str, Probe] = {}

    def poll(self) -> None:
        for path in (self.folder / "journal").glob("*.seg"):
            with suppress(FileExistsError, FileNotFoundError):
                os.link(path, self.archive / path.name)  # the same file: it grows here as it grows there
        for record in self._tail.poll():
            self.history.apply(record)
        for probe in self.probes.values():
            probe.poll()

    @property
    def served(self) -> int:
        """The newest version with which all rollout servers have asked for leases."""
        return min(probe.live for probe in self.probes.values())

    @property
    def writes_checkpoint(self) -> bool:
        """A checkpoint folder of a step above all complete ones is there without its mark."""
        newest = max(self.checkpoints(complete=True), default=0)
        return any(step > newest for step in self.checkpoints(complete=False))

    def checkpoints(self, *, complete: bool) -> list[int]:
        paths = (self.folder / "checkpoints").glob("step_*")
        return [int(path.name.removeprefix("step_")) for path in paths if (path / "COMPLETE").exists() == complete]


class Line(NamedTuple):
    """A line of a log. Example: Line("replay.log", "... lost 'rollout-a' (pid 7) ... [closed]")"""

    log: str
    text: str

    @property
    def classes(self) -> set[str]:
        return set(CLASS.findall(self.text))


class Logs:
    """All logs of a run as one: the files of its folder, and others given by name."""

    def __init__(self, folder: Path, others: list[Path]) -> None:
        self.folder, self.others = folder, others

    def mark(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in self._paths()}

    def since(self, mark: dict[Path, int]) -> Iterator[Line]:
        for path in self._paths():
            with path.open("rb") as file:
                file.seek(mark.get(path, 0))
                data = file.read()
            for text in data[: data.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines():
                yield Line(path.name, text)

    def first(self, patterns: Iterable[str], mark: dict[Path, int]) -> Line | None:
        any_of = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
        return next((line for line in self.since(mark) if any_of.search(line.text)), None)

    def _paths(self) -> list[Path]:
        return [path for path in (*sorted(self.folder.glob("*.log")), *self.others) if path.exists()]
