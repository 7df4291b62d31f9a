"""What the logs of a run warn of, each thing once: `top` and the dashboard show it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.launch.announcements import Repeats, launchers_last
from slipstream.launch.children import Tail

LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d+ (\S+) (WARNING|ERROR|CRITICAL) (.*)")
TAIL_BYTES = 256 * 1024
"""Of the end of each log, where warnings of before are found: older ones are in the file."""


@dataclass(frozen=True, slots=True)
class Warned:
    """One line. Example: Warned("2026-11-23 01:00:00", "learner-0", "WARNING", "guard: ...", "learner-0.log")."""

    time: str
    name: str
    level: str
    text: str
    file: str


@dataclass(slots=True)
class Warnings:
    """Warnings and errors in a folder of logs, as they come."""

    folder: Path
    _tails: dict[Path, Tail] = field(default_factory=dict)
    _repeats: Repeats = field(default_factory=Repeats)

    def new(self) -> Iterator[Warned]:
        """Those since the last call; at first, those at the end of each log."""
        for path in launchers_last(self.folder):
            if path not in self._tails:
                found = path.stat()
                self._tails[path] = Tail(path, max(0, found.st_size - TAIL_BYTES), found.st_ino)
            for line in self._tails[path].new_lines():
                if (match := LINE.match(line)) and self._repeats.is_new(path, line, match[4]):
                    yield Warned(match[1], match[2], match[3], match[4], path.name)
