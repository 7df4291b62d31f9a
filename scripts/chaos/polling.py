"""Waits with a deadline, and JSON lines that another process writes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from slipstream.launch.children import Tail

POLL_S = 0.01
T = TypeVar("T")


class Hung(RuntimeError):
    """A wait was not over at its deadline; the message says which."""


class Ended(RuntimeError):
    """A process ended that should go on."""


def wait_until(
    condition: Callable[[], T | None],
    what: str,
    deadline_s: float,
    *,
    look: Callable[[], None] = lambda: time.sleep(POLL_S),
    state: Callable[[], str] = str,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Poll until a condition holds; what it is then. `look` is called between polls. Raises Hung, with `state`."""
    until = clock() + deadline_s
    while not (found := condition()):
        if clock() > until:
            raise Hung(f"{what}: not within {deadline_s:.1f} s; {state()}".removesuffix("; "))
        look()
    return found


class JsonLines:
    """A file of JSON lines that may still grow; `events` are all lines so far."""

    def __init__(self, path: Path) -> None:
        self.path, self._tail = path, Tail(path)
        self.events: list[dict[str, Any]] = []

    def poll(self) -> list[dict[str, Any]]:
        """New whole lines; a process that was killed may leave a torn one."""
        new = self._tail.new_rows()
        self.events += new
        return new

    @classmethod
    def read(cls, path: Path) -> list[dict[str, Any]]:
        return cls(path).poll()


def replace_text(path: Path, text: str) -> None:
    """Write a file that others read meanwhile: they find the old or the new text, never half of one.

    A device or pipe is written to: a file in its place would be everybody's, such as for `--out /dev/null`.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.rename(path)
