"""What processes of this machine say in their logs that the terminal shows: guards, leaks, hangs, progress."""

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from slipstream.launch.children import Tail
from slipstream.launch.terminal import EVENTS_LOG

LINE = re.compile(r" (?:WARNING|INFO) ((guard|leak|progress): .*)")
HANG = re.compile(r" WARNING (.*; hang report: (\S+).*)")
"""What took too long in a process that goes on."""
FIRST = re.compile(r"learner-0|rollout-(.*-)?0")
"""Logs of which progress is shown: others go through the same, and replay's is shown as it starts."""


REMEMBERED = 1000
"""Lines among which a repeated one is looked for."""
OTHER_RANK = re.compile(r" learner-(?!0 )\d+ [A-Z]+ guard: ")


class Repeats:
    """What several logs of a run say: the launcher's repeats what it shows, and ranks judge alike.

    Give it the launcher's log after the others.
    """

    def __init__(self) -> None:
        self._said: deque[str] = deque(maxlen=REMEMBERED)

    def is_new(self, path: Path, line: str, text: str) -> bool:
        """Whether no other log has said what the launcher says, and no other rank what rank 0 does."""
        known = path.name == EVENTS_LOG and text in self._said
        self._said.append(text)
        return not known and OTHER_RANK.search(line) is None


def launchers_last(folder: Path) -> list[Path]:
    """The logs of a run, in the order that `Repeats` needs."""
    return sorted(folder.glob("*.log"), key=lambda path: (path.name == EVENTS_LOG, path))


class Announcements:
    """New lines of a run's logs, from now on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails = {path: Tail.from_end(path) for path in self._logs()}
        self._hangs: set[tuple[str, str]] = set()
        """Log and report of each that was shown: what else expires meanwhile is in the report."""

    def _logs(self) -> list[Path]:
        """All but the one that says again what was shown: it would be shown without end."""
        return sorted(path for path in self._folder.glob("*.log") if path.name != EVENTS_LOG)

    def new(self) -> Iterator[str]:
        """What was said since the last call; of a guard by rank 0 alone, as all ranks judge alike."""
        for path in self._logs():
            for line in self._tails.setdefault(path, Tail(path)).new_lines():
                if (hang := HANG.search(line)) is not None and (path.stem, hang[2]) not in self._hangs:
                    self._hangs.add((path.stem, hang[2]))
                    yield f"{path.stem}: {hang[1]}"
                if (found := LINE.search(line)) is None:
                    continue
                if found[2] == "leak" or (found[2] == "guard" and path.stem == "learner-0"):
                    yield found[1]
                elif found[2] == "progress" and FIRST.fullmatch(path.stem):
                    yield f"{path.stem}: {found[1].removeprefix('progress: ')}"
