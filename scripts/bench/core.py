"""What all benchmarks share: a deadline, processes with logs, costs from /proc, medians, the last line. No torch."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from learner.launch import children
from learner.launch.children import Child
from scripts.chaos.polling import Hung, wait_until

LOG_LINES, LOG_WIDTH = 15, 240
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ZMQ_IO = "ZMQbg/IO"
UTIME, STIME = 11, 12
"""Fields of /proc/PID/stat behind the name, counted from 0 (proc(5) counts from 1 and has two before)."""

Row = Mapping[str, Any]


class CaseFailed(RuntimeError):
    """A case has no result: the first line is the root cause, the others the last lines of every process's log."""


# ---- output ---------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A line for the reader at the terminal; standard output is for results."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file as a whole, so that a later failure costs nothing that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def tail(text: str) -> str:
    """The last lines, each cut to a readable width."""
    return "\n".join(line[:LOG_WIDTH] for line in text.splitlines()[-LOG_LINES:])


def tails(logs: Iterable[Path]) -> str:
    """The last lines of every log, each below the name of its file."""
    return "\n".join(f"--- {log}\n{tail(log.read_text(encoding='utf-8', errors='replace'))}" for log in logs)


def table(results: Sequence[Row], title: str) -> str:
    """Markdown: the numbers of all cases beside each other, a line for each that has none."""
    good = [result for result in results if "error" not in result]
    keys = dict.fromkeys(key for result in good for key in result if key != title)
    lines = [[title, *(str(result[title]) for result in good)], ["---"] * (1 + len(good))]
    lines += [[key, *(_cell(result.get(key)) for result in good)] for key in keys]
    failed = [f"{result[title]}: no result: {result['error']}" for result in results if "error" in result]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines if good), "", *failed])


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def add_sizes(parser: argparse.ArgumentParser, sizes: Mapping[str, tuple[Any, Any, str]]) -> None:
    """Options that --quick changes, by name: (default, default with --quick, help)."""
    parser.add_argument("--quick", action="store_true", help="small and short, in less than a minute")
    for name, (whole, quick, text) in sizes.items():
        shown = f"{text} (default: {whole}; with --quick {quick})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(whole), help=shown)


def fill_sizes(args: argparse.Namespace, sizes: Mapping[str, tuple[Any, Any, str]]) -> None:
    """Defaults for the sizes that were not given."""
    for name, defaults in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[args.quick])


# ---- numbers --------------------------------------------------------------------------------------------


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def p90(values: Sequence[float]) -> float:
    """The value that nine in ten do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-9 * len(ordered) // 10) - 1)]


def median_of(rows: Iterable[Row], key: str) -> float:
    """Median of a key; a row without it counts as 0."""
    return statistics.median(row.get(key, 0.0) for row in rows)


def spread(sample: dict[str, Any]) -> float:
    """Reward in [0, 1) that differs for every answer, so that every token is trained on."""
    return zlib.crc32(sample["completion"].encode()) / 2**32


# ---- deadlines and processes ----------------------------------------------------------------------------


def until(done: Callable[[], bool], limit_s: float, look_s: float = 0.05) -> bool:
    """Poll `done` until it holds; False when that takes longer than `limit_s`."""
    try:
        return wait_until(done, "it", limit_s, look=lambda: time.sleep(look_s))
    except Hung:
        return False


def output_of(what: str, command: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> str:
    """Standard output of a command that ends well within `limit_s`. Raises CaseFailed."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as expired:
        raise CaseFailed(f"{what}: not done within {limit_s:g} s") from expired
    if done.returncode:
        raise CaseFailed(f"{what}: failed with exit code {done.returncode}\n{tail(done.stderr)}")
    return done.stdout


class Processes:
    """The processes of a case, each with a log; a context manager that leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        children.stop(self.children, patience_s=10)

    def start(self, name: str, command: Sequence[str], **environment: str) -> Child:
        """Start a process whose output goes to a file."""
        self.children.append(children.start(name, command, self.folder / f"{name}.log", environment))
        return self.children[-1]

    def fail(self, why: str) -> CaseFailed:
        """The error that says why, with the last lines of every log."""
        return CaseFailed(f"{why}\n{tails(child.log_path for child in self.children)}")

    def check(self, *, may_end: bool = False) -> None:
        """Raises CaseFailed when a process has ended, or with `may_end` when it has failed."""
        for child in self.children:
            if child.exit_code() not in (None, 0 if may_end else None):
                raise self.fail(f"{child.name} ended: {child.how_it_ended()}")

    def wait_until(
        self, what: str, done: Callable[[], bool], limit_s: float, *, look_s: float = 0.05, may_end: bool = False
    ) -> None:
        """Raises CaseFailed when `limit_s` pass, or a process ends."""

        def look() -> bool:
            self.check(may_end=may_end)
            return done()

        if not until(look, limit_s, look_s):
            raise self.fail(f"waited {limit_s:g} s for {what}")

    def ended(self) -> bool:
        """Whether none runs any more."""
        return all(child.exit_code() is not None for child in self.children)


# ---- costs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """CPU seconds since the start of a process."""

    user: float
    system: float
    main: float
    """The main thread: Python, the service, the batches."""
    zmq_io: float
    """ZeroMQ's thread: sockets, framing, CURVE."""

    @property
    def total(self) -> float:
        """All threads, those that have ended included."""
        return self.user + self.system

    @property
    def other(self) -> float:
        """Threads beside the main one and ZeroMQ's."""
        return self.total - self.main - self.zmq_io

    def since(self, before: "Cost") -> "Cost":
        """CPU seconds between two readings."""
        return Cost(**{name: getattr(self, name) - getattr(before, name) for name in self.__slots__})


def cost_of(pid: int) -> Cost:
    """CPU seconds of a process. Raises FileNotFoundError when it is gone."""
    folder = Path("/proc") / str(pid)
    user, system = _times(folder / "stat")[1:]
    main = zmq_io = 0.0
    for thread in (folder / "task").iterdir():
        try:
            name, thread_user, thread_system = _times(thread / "stat")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since the folder was listed; the process's total has its seconds
        if thread.name == str(pid):
            main = thread_user + thread_system
        elif name.startswith(ZMQ_IO):
            zmq_io += thread_user + thread_system
    return Cost(user=user, system=system, main=main, zmq_io=zmq_io)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int((Path("/proc") / str(pid) / "statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES


def written_bytes(pid: int) -> int:
    """Bytes that a process gave to write() and its like; send() to sockets is not in it."""
    lines = (Path("/proc") / str(pid) / "io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def _times(path: Path) -> tuple[str, float, float]:
    """(name, user seconds, system seconds) of a stat file; the name may hold spaces and brackets."""
    head, _, rest = path.read_text(encoding="utf-8").rpartition(")")
    fields = rest.split()
    return head.partition("(")[2], int(fields[UTIME]) / TICKS_PER_S, int(fields[STIME]) / TICKS_PER_S
