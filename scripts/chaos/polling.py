"""Waits with a deadline, and JSON lines that another process writes."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

POLL_S = 0.01
T = TypeVar("T")


class Hung(RuntimeError):
    """A wait was not over at its deadline; the message says which."""


class Ended(RuntimeError):
    """A process ended that should go on."""


def wait_until(
    condition: Callable[[], T],
    what: str,
    deadline_s: float,
    *,
    look: Callable[[], None] = lambda: time.sleep(POLL_S),
    state: Callable[[], str] = str,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Poll until a condition holds; what it is then.

    Args:
        condition: what is waited for.
        what: the same in words.
        deadline_s: from now.
        look: called between two polls.
        state: what the error says of the situation.
        clock: in seconds.

    Raises:
        Hung: the condition did not hold within the deadline.
    """
    until = clock() + deadline_s
    while not (found := condition()):
        if clock() > until:
            raise Hung(f"{what}: not within {deadline_s:.1f} s; {state()}".removesuffix("; "))
        look()
    return found


@dataclass(slots=True)
class JsonLines:
    """A file of JSON lines that may still grow."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    """All lines so far."""
    _offset: int = 0

    def poll(self) -> list[dict[str, Any]]:
        """New whole lines; a process that was killed may leave a torn one."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        new = [json.loads(line) for line in whole.splitlines()]
        self.events += new
        return new

    @classmethod
    def read(cls, path: Path) -> list[dict[str, Any]]:
        """The whole lines of a file; none where it is missing."""
        return cls(path).poll()
