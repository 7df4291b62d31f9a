"""Spans of one process, for a trace of a window of steps (tracking.profile): trace/<process>.jsonl in the run folder.

A line is one of

    {"process": "rollout-0", "role": "rollout_server", "host": "n1", "pid": 4711, "boot": "...", "unix_ns": ...}
    {"clock": {"ahead_s": 0.0121, "error_s": 0.0004}}          replay's clock against that of this process
    {"lane": "weights", "name": "paused", "start": ..., "end": ..., "args": {...}}
    {"lane": "groups", "name": "group 0/17", "start": ..., "end": ..., "at_once": true, "parts": [["sample", ..., ...]]}

Times are CLOCK_MONOTONIC in ns, which all processes of one boot share; `unix_ns` is what to add for Unix time. Where
the boot is not that of replay's machine, `clock` says by how much the Unix times differ (slipstream/view/trace). A line
with a process begins each start of it. Readers pass over a torn last line.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from slipstream.runtime.lifeline import BoundedLog

log = logging.getLogger(__name__)

Part = tuple[str, int, int]
"""Name, beginning and end of a part of a span."""

FOLDER = "trace"
BOOT = Path("/proc/sys/kernel/random/boot_id")


def now_ns() -> int:
    """The clock of all spans."""
    return time.monotonic_ns()


def to_ns(moment: float) -> int:
    """Of a reading of time.monotonic() or, on Linux the same, time.perf_counter()."""
    return round(moment * 1e9)


def unix_minus_monotonic_ns() -> int:
    """What makes Unix time of a span's time, at this moment; the best of a few readings."""
    readings = []
    for _ in range(5):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, unix - (before + after) // 2))
    return min(readings)[1]


def boot() -> str:
    """Of this machine since it started; its name where the system has no such number."""
    return BOOT.read_text().strip() if BOOT.exists() else socket.gethostname()


class Recorder:
    """Writes down the spans of this process while its version is within `versions`; otherwise it does nothing.

    Belongs to one thread, or to one event loop. A file that cannot be written is logged, and no more.
    """

    def __init__(self, run_dir: str | Path, name: str, role: str, versions: range) -> None:
        """`versions` are those that the process has while it records; an empty range records nothing."""
        self._path = Path(run_dir) / FOLDER / f"{name}.jsonl"
        self._head = {"process": name, "role": role, "host": socket.gethostname(), "pid": os.getpid()}
        self._versions = versions
        self._file: TextIO | None = None
        self._log = BoundedLog(log)
        self.on = False
        """Whether spans are recorded now; callers with spans to compute ask first."""

    @classmethod
    def off(cls) -> "Recorder":
        """One that never records."""
        return cls(".", "", "", range(0))

    def at(self, version: int) -> None:
        """The process has this version now."""
        self.on = version in self._versions

    def add(
        self,
        lane: str,
        name: str,
        start: int,
        end: int,
        *,
        at_once: bool = False,
        parts: Sequence[Part] = (),
        **args: Any,
    ) -> None:
        """A span of a lane, in ns of `now_ns`.

        Spans of a lane may nest, as calls do; with `at_once` they overlap in any way, and `parts` are what lies inside.
        """
        if not self.on:
            return
        more = {"at_once": at_once, "parts": parts, "args": args}
        given = {key: value for key, value in more.items() if value}
        self._write({"lane": lane, "name": name, "start": start, "end": end, **given})

    @contextmanager
    def span(self, lane: str, name: str, *, at_once: bool = False) -> Iterator[None]:
        """Record the time inside, also where it raises."""
        start = now_ns()
        try:
            yield
        finally:
            self.add(lane, name, start, now_ns(), at_once=at_once)

    def clock(self, ahead_s: float, error_s: float) -> None:
        """Replay's clock was measured to be ahead of this one's by so much, and may be by `error_s` more or less."""
        if self.on:
            self._write({"clock": {"ahead_s": round(ahead_s, 7), "error_s": round(error_s, 7)}})

    def close(self) -> None:
        """Close the file; a later span opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, line: dict[str, Any]) -> None:
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._path.open("a", encoding="utf-8", buffering=1)  # by lines: the process may be killed
                head = {**self._head, "boot": boot(), "unix_ns": unix_minus_monotonic_ns()}
                self._file.write(json.dumps(head) + "\n")
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._log.warning("trace", "%s: spans are left out: %s", self._path, error)


@dataclass(slots=True)
class ClockProbe:
    """Compares this process's clock with replay's by questions over the channel, one at a time.

    Replay's answer was given at some moment between question and arrival, so (sent + arrived) / 2 is wrong by half of
    that time at most. The quickest answer counts.
    """

    ahead_s: float = 0.0
    error_s: float = float("inf")
    _asked_at: float | None = None

    def ask(self, now: float) -> bool:
        """Whether to ask at this Unix time: not while an answer is awaited."""
        if self._asked_at is not None:
            return False
        self._asked_at = now
        return True

    def answer(self, theirs: float, now: float) -> bool:
        """Replay's Unix time has come; whether it is the best answer so far."""
        asked, self._asked_at = self._asked_at, None
        if asked is None or (now - asked) / 2 >= self.error_s:
            return False
        self.ahead_s, self.error_s = theirs - (asked + now) / 2, (now - asked) / 2
        return True

    def forget(self) -> None:
        """The question that is out may never be answered."""
        self._asked_at = None
