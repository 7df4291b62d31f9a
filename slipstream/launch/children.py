"""Child processes of a run: started in sessions of their own, watched, ended, with their last error at hand.

Each child logs to `<run>/logs/<name>.log`. Nothing outlives the launcher: children ask the kernel to be
killed with it (slipstream/runtime/lifeline.py), and `stop` ends what is left by pid and process group.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import CODE, coded
from slipstream.runtime import packages
from slipstream.runtime.ending import SUFFIX, Ending, how, read_file
from slipstream.runtime.hang import expired
from slipstream.runtime.hang.report import end_of
from slipstream.runtime.processes import of

LONGEST = 600
"""Characters of what a process said that are quoted."""


@dataclass(slots=True)
class Child:
    """One child process and where it logs."""

    name: str
    process: "subprocess.Popen[bytes]"
    log_path: Path
    offset: int
    """Where this process's part of its log begins."""

    @property
    def pid(self) -> int:
        """Process id, also of its process group."""
        return self.process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self.process.poll()

    @property
    def ending(self) -> Ending | None:
        """What it noted when it ended; None of one that was killed, or never got to note it."""
        found = read_file(ending_of(self.log_path))
        return found if found is not None and found.pid == self.pid else None

    def how_it_ended(self) -> str:
        """`exit code 2` or `killed by SIGKILL`, with what it said of it, or else the last line of its log."""
        code = self.exit_code()
        if code is None:
            return "still running"
        if (ending := self.ending) is not None:
            said = ending.said
        else:  # what was killed from outside says no cause: its last line is unrelated
            said = "" if -code in (signal.SIGKILL, signal.SIGTERM) else last_line(self.log_path, self.offset)
        return f"{how(code)}: {without_time(said)}" if said else f"{how(code)} (log: {self.log_path})"

    def root_cause(self) -> str:
        """Which process died, and how, in one line."""
        return f"{self.name} (pid {self.pid}) died: {self.how_it_ended()}"


@dataclass(slots=True)
class Tail:
    """Whole lines that another process appends to a file."""

    path: Path
    offset: int = 0
    inode: int = 0

    @classmethod
    def from_end(cls, path: Path) -> "Tail":
        """Without what is there already."""
        found = path.stat() if path.exists() else None
        return cls(path, found.st_size, found.st_ino) if found is not None else cls(path)

    def new_lines(self) -> list[str]:
        """What came since the last call; from the first line on where the file was written anew."""
        return list(self.lines())

    def lines(self) -> Iterator[str]:
        """The same, one after the other."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return
        if (found.st_ino, found.st_size) == (self.inode, self.offset):  # most logs, most times
            return
        with self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self.inode:
                self.inode, self.offset = inode, 0
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):  # torn: its rest comes
                    return
                self.offset += len(line)
                yield line[:-1].decode("utf-8", "replace")

    def new_rows(self) -> list[dict[str, Any]]:
        """The new lines of a file of JSON lines."""
        return [json.loads(line) for line in self.new_lines()]


@dataclass(slots=True)
class RowTail(Tail):
    """Rows of metrics.jsonl, each once: a learner that starts again writes it anew, with the rows of steps it keeps."""

    newest: float = 0.0
    """Time of the newest row, or one before which all rows are known: where the file is new, later ones count."""

    def new_rows(self) -> list[dict[str, Any]]:
        """The rows that came since the last call."""
        inode, rows = self.inode, []
        for line in self.lines():  # of a file written anew, which may be long, few are kept
            row = json.loads(line)
            if row["time"] > (self.newest if self.inode != inode else 0.0):
                rows.append(row)
        self.newest = max([self.newest, *(row["time"] for row in rows)])
        return rows


def start(name: str, command: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> Child:
    """Start a child in a session of its own, its output appended to the log."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    ending_of(log_path).unlink(missing_ok=True)
    with log_path.open("ab") as log:
        offset = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **packages.environment(), **environment},
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which ends the others in order
        )
    return Child(name, process, log_path, offset)


def stop(children: Sequence[Child], patience_s: float = 5.0) -> None:
    """SIGTERM all, give them `patience_s`, then SIGKILL their process groups."""
    # A child that ended hours ago may have left its number to a process of another run, which leads a group as well.
    mine = [child for child in children if child.exit_code() is None or of(child.pid) is None]
    for child in children:
        child.process.terminate()
    wait_or_kill([child.process for child in children], patience_s)
    for child in mine:
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(child.pid, signal.SIGKILL)


def wait_or_kill(processes: Sequence["subprocess.Popen[bytes]"], patience_s: float) -> list["subprocess.Popen[bytes]"]:
    """Give processes `patience_s` in all to end, then SIGKILL them; returns those that were killed."""
    deadline, late = time.monotonic() + patience_s, []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(process)
            process.kill()
            process.wait()
    return late


def wait_for(
    child: Child, found: Callable[[], str | None], timeout_s: float, *, progress: str, show: Callable[[str], None]
) -> str | None:
    """Wait for what `found` gives; None when the child ends or time is up.

    Meanwhile `show` gets the first group of every line of its log that matches `progress`.
    """
    deadline = time.monotonic() + timeout_s
    tail = Tail(child.log_path, child.offset, child.log_path.stat().st_ino)
    while True:
        is_last = child.exit_code() is not None or time.monotonic() > deadline
        answer = found()
        for line in tail.new_lines():
            if shown := re.search(progress, line):
                show(shown[1])
        if answer is not None or is_last:
            return answer
        time.sleep(0.02)


def late(child: Child, waited_s: float) -> str:
    """`; hang report: FILE` of a child that still runs where it should have answered or left; else nothing."""
    if child.exit_code() is not None:
        return ""
    return expired(f"{child.name} (pid {child.pid})", owed_by=(child.name,), waited_s=waited_s, key="a fixed deadline")


def ending_of(log_path: Path) -> Path:
    """Where the process of a log notes how it ended."""
    return log_path.with_suffix(SUFFIX)


def last_line(log_path: Path, offset: int = 0) -> str:
    """The last line since the last start: a traceback ends in its error."""
    lines = [line.strip() for line in end_of(log_path, offset).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def without_time(line: str) -> str:
    """A log line without the time that it begins with, cut to a length that keeps its code."""
    text = re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ ", "", line)
    found = CODE.findall(text)
    return text if len(text) <= LONGEST else coded(text[:LONGEST], found[0] if found else "")
