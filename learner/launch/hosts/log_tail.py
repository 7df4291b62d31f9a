"""Shows what processes write into their logs, line by line, as `tail -f` does."""

import sys
from dataclasses import dataclass
from pathlib import Path

PIECE = 1024 * 1024


@dataclass(slots=True)
class Followed:
    """One log file from a place on."""

    path: Path
    offset: int
    rest: bytes = b""

    def new_lines(self) -> list[str]:
        """Whole lines that came since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            new = file.read(PIECE)
        self.offset += len(new)
        *lines, self.rest = (self.rest + new).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]


class Following:
    """Several logs, shown on standard output as they grow. What was in them before is not shown."""

    def __init__(self) -> None:
        self._logs: dict[Path, Followed] = {}

    def add(self, path: Path) -> None:
        """Show this log from its present end on."""
        if path not in self._logs:
            self._logs[path] = Followed(path, path.stat().st_size if path.exists() else 0)

    def show(self) -> None:
        """Write what is new. Raises BrokenPipeError when standard output has no reader."""
        for followed in self._logs.values():
            for line in followed.new_lines():
                sys.stdout.write(line + "\n")
        sys.stdout.flush()
