"""All logs of a run as one: what was written since a moment, and which symptom classes it names."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CLASSES = ("closed", "silent", "slow", "corrupt", "full", "duplicate")
"""The symptom classes, which stand in brackets in a log line."""
CLASS = re.compile(rf"\[({'|'.join(CLASSES)})\]")


@dataclass(frozen=True, slots=True)
class Line:
    """One line. Example: Line("replay.log", "... lost 'rollout-a' (pid 7) ... [closed]")"""

    log: str
    text: str

    @property
    def classes(self) -> set[str]:
        """Symptom classes that it names."""
        return set(CLASS.findall(self.text))


class Logs:
    """The log files of a run folder, and others given by name."""

    def __init__(self, folder: Path, others: Iterable[Path]) -> None:
        self.folder = folder
        self.others = tuple(others)

    def mark(self) -> dict[Path, int]:
        """This moment, for `since`: how long each log is."""
        return {path: path.stat().st_size for path in self._paths()}

    def since(self, mark: dict[Path, int]) -> Iterator[Line]:
        """Whole lines that were written after `mark`."""
        for path in self._paths():
            with path.open("rb") as file:
                file.seek(mark.get(path, 0))
                data = file.read()
            for text in data[: data.rfind(b"\n") + 1].decode("utf-8", "replace").splitlines():
                yield Line(path.name, text)

    def first(self, patterns: Iterable[str], mark: dict[Path, int]) -> Line | None:
        """The first line since `mark` in which any of the patterns is found."""
        searches = [re.compile(pattern) for pattern in patterns]
        return next((line for line in self.since(mark) if any(s.search(line.text) for s in searches)), None)

    def _paths(self) -> list[Path]:
        found = [*sorted(self.folder.glob("*.log")), *self.others]
        return [path for path in found if path.exists()]
