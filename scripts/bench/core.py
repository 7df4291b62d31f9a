"""What all benchmarks share: a deadline, processes with logs, costs from /proc, medians, the last line. No torch."""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from scripts.chaos.polling import Hung, wait_until

LOG_LINES, LOG_WIDTH = 15, 240
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
ZMQ_IO = "ZMQbg/IO"
UTIME, STIME = 11, 12
"""Fields of /proc/PID/stat behind the name, counted from 0 (proc(5) counts from 1 and has two before)."""

Row = Mapping[str, Any]


class CaseFailed(RuntimeError):
    """A case has no result; the message is the root cause, `logs` the last lines of every process."""

    def __init__(self, message: str, logs: str = "") -> None:
        super().__init__(message)
        self.logs = logs


# ---- output ---------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A line for the reader at the terminal; standard output is for results."""
    sys.stderr.write(f"bench: {text}\n")
    sys.stderr.flush()


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file as a whole, so that a later failure costs nothing that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def tail(text: str) -> str:
    """The last lines, each cut to a readable width."""
    return "\n".join(line[:LOG_WIDTH] for line in text.splitlines()[-LOG_LINES:])


def table(results: Sequence[Row], title: str) -> str:
    """Markdown: the numbers of all cases beside each other, a line for each that has none."""
    good = [result for result in results if "error" not in result]
    keys = dict.fromkeys(key for result in good for key in result if key != title)
    lines = [[title, *(str(result[title]) for result in good)], ["---"] * (1 + len(good))]
    lines += [[key, *(shown(result.get(key)) for result in good)] for key in keys]
    failed = [f"{result[title]}: no result: {result['error']}" for result in results if "error" in result]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines if good), "", *failed])


def shown(value: Any) -> str:
    """A cell: floats with four digits."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


# ---- numbers --------------------------------------------------------------------------------------------


def median(values: Iterable[float]) -> float | None:
    """None of nothing."""
    found = list(values)
    return statistics.median(found) if found else None


def p90(values: Sequence[float]) -> float:
    """The value that nine in ten do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-9 * len(ordered) // 10) - 1)]


def median_of(rows: Iterable[Row], key: str) -> float:
    """Median of a key; a row without it counts as 0."""
    return statistics.median(row.get(key, 0.0) for row in rows)


def phases(rows: Sequence[Row]) -> dict[str, float]:
    """Medians of everything that is in seconds."""
    return {key: median_of(rows, key) for key in sorted({key for row in rows for key in row}) if key.endswith("_s")}


def spread(sample: dict[str, Any]) -> float:
    """Reward in [0, 1) that differs for every answer, so that every token is trained on."""
    return zlib.crc32(sample["completion"].encode()) / 2**32


# ---- deadlines and processes ----------------------------------------------------------------------------


def until(done: Callable[[], bool], limit_s: float, look_s: float = 0.05) -> bool:
    """Poll `done` until it holds; False when that takes longer than `limit_s`."""
    try:
        wait_until(done, "it", limit_s, look=lambda: time.sleep(look_s))
    except Hung:
        return False
    return True


class Processes:
    """The processes of a case, each with a log; a context manager that leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.by_name: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.by_name.values():
            process.terminate()
        for process in self.by_name.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()

    def start(self, name: str, command: Sequence[str], **environment: str) -> None:
        """Start a process whose output goes to a file; a variable that is empty is unset."""
        merged = {key: value for key, value in {**os.environ, **environment}.items() if value or key not in environment}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.by_name[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=merged
            )

    def pid(self, name: str) -> int:
        """Process id."""
        return self.by_name[name].pid

    def log(self, name: str) -> str:
        """Everything that a process has written so far."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def logs(self) -> str:
        """The last lines of every log."""
        return "\n".join(f"--- {name}\n{tail(self.log(name))}" for name in self.by_name)

    def check(self, *, may_end: bool = False) -> None:
        """Raises CaseFailed when a process has ended, or with `may_end` when it has failed."""
        for name, process in self.by_name.items():
            code = process.poll()
            if code is not None and not (may_end and code == 0):
                raise CaseFailed(f"{name} ended with code {code}: {tail(self.log(name))}", self.logs())

    def wait_until(
        self, what: str, done: Callable[[], bool], limit_s: float, *, look_s: float = 0.05, may_end: bool = False
    ) -> None:
        """Raises CaseFailed when `limit_s` pass, or a process ends."""

        def look() -> bool:
            self.check(may_end=may_end)
            return done()

        if not until(look, limit_s, look_s):
            raise CaseFailed(f"waited {limit_s:g} s for {what}", self.logs())

    def ended(self) -> bool:
        """Whether none runs any more."""
        return all(process.poll() is not None for process in self.by_name.values())

    def wait_for_end(self, name: str, limit_s: float) -> None:
        """Wait for one to end well. Raises CaseFailed."""
        process = self.by_name[name]
        if not until(lambda: process.poll() is not None, limit_s):
            raise CaseFailed(f"{name} did not end within {limit_s:g} s", self.logs())
        if process.returncode != 0:
            raise CaseFailed(f"{name} ended with code {process.returncode}: {tail(self.log(name))}", self.logs())


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

    def since(self, before: "Cost") -> "Cost":
        """CPU seconds between two readings."""
        return Cost(**{name: getattr(self, name) - getattr(before, name) for name in self.__slots__})


def cost_of(pid: int) -> Cost:
    """CPU seconds of a process. Raises FileNotFoundError when it is gone."""
    folder = Path("/proc") / str(pid)
    user, system = _times(folder / "stat")[1:]
    main = zmq_io = 0.0
    for thread in (folder / "task").iterdir():
        name, thread_user, thread_system = _times(thread / "stat")
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


def ask_gpus(fields: str) -> list[str]:
    """Lines of `nvidia-smi --query-gpu`; none where it is missing or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)
        return done.stdout.splitlines() if done.returncode == 0 else []
    return []
