"""What all campaigns print at their end, and the state file from which one that was ended goes on."""

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STATE = "state.json"
BEGAN = time.monotonic()


class State:
    """What a campaign has done so far, in its work folder: started again with the same arguments, it goes on there.

    Args:
        work: the folder; None takes a temporary one.
        arguments: of the campaign, JSON.

    Raises:
        ValueError: the folder holds something else.
    """

    def __init__(self, work: Path | None, campaign: str, arguments: Mapping[str, Any]) -> None:
        self.is_temporary = work is None
        self.work = (work or Path(tempfile.mkdtemp(prefix=f"chaos-{campaign}-"))).resolve()
        self._path = self.work / STATE
        self._head = {"campaign": campaign, "arguments": dict(arguments)}
        self.done: list[Any] = []
        """A JSON value for each part that is over."""
        if self._path.exists():
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self.done = found.pop("done")
            if found != self._head:
                raise ValueError(f"--work {work}: is of {json.dumps(found)}, not {json.dumps(self._head)}")
        elif self.work.exists() and any(self.work.iterdir()):
            raise ValueError(f"--work {work}: is not empty and has no {STATE}; take another folder")
        self.work.mkdir(parents=True, exist_ok=True)
        self._write()

    def add(self, part: Any) -> None:
        """One more part is over."""
        self.done.append(part)
        self._write()

    def fresh(self, name: str) -> Path:
        """An empty folder in the work folder; one that a part was ended in is removed."""
        folder = self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def remove(self) -> None:
        """Remove the work folder, where it is a temporary one."""
        if self.is_temporary:
            shutil.rmtree(self.work)

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({**self._head, "done": self.done}), encoding="utf-8")
        new.rename(self._path)


def say(text: str) -> None:
    """One line for each event, with the seconds since the campaign began."""
    print(f"{time.monotonic() - BEGAN:7.1f} s  {text}", flush=True)


def conclude(result: Mapping[str, Any], wrong: Iterable[str], *, in_order: bool) -> int:
    """Print what is wrong and the line of JSON; the exit code."""
    for text in wrong:
        print(f"WRONG: {text}")
    print(json.dumps(result), flush=True)
    return 0 if in_order else 1


def end_on_sigterm() -> None:
    """SIGTERM ends the campaign as Ctrl-C does: everything that was started is ended on the way out."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
