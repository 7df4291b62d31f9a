"""What all benchmarks share: processes with logs and deadlines, costs from /proc, options, a table. No torch."""

import argparse
import json
import math
import platform
import statistics
import sys
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import psutil

from configs.base import ConfigError
from configs.errors import SlipstreamError
from learner.record.metrics import MetricsError
from scripts.chaos.polling import Hung, replace_text, wait_until
from slipstream.launch import children
from slipstream.launch.children import Child

LOG_LINES, LOG_WIDTH = 15, 240
Row = Mapping[str, Any]
Sizes = Mapping[str, tuple[Any, Any, str]]  # by option: (default, default with --quick, help)


class CaseFailed(SlipstreamError, RuntimeError, code="SLIP-BENCH-01"):
    """A case has no result: the first line is the root cause, the others the last lines of every process's log."""


def say(text: str) -> None:
    """A line for the reader at the terminal; standard output is for results."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file as a whole, so that a later failure costs nothing that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(value, indent=1) + "\n")


@contextmanager
def noted(result: dict[str, Any], key: str) -> Iterator[None]:
    """What fails inside goes to the terminal, its first line into the result as well."""
    try:
        yield
    except (CaseFailed, ConfigError, MetricsError, KeyError) as error:
        text = str(error) if isinstance(error, CaseFailed) else f"{type(error).__name__}: {error}"
        say(text)
        result[key] = text.splitlines()[0]


def failed(why: str, folder: Path) -> CaseFailed:
    """The error that says why, with the last lines of every log in a folder, each cut to a readable width."""
    lines = [why]
    for log in sorted(folder.glob("*.log")):
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
        lines += [f"--- {log}", *(line[:LOG_WIDTH] for line in last)]
    return CaseFailed("\n".join(lines))


def table(results: Sequence[Row], title: str) -> str:
    """Markdown: the numbers of all cases beside each other, a line for each that has none."""
    good = [result for result in results if "error" not in result]
    keys = dict.fromkeys(key for result in good for key in result if key != title)
    lines = [[title, *(str(result[title]) for result in good)], ["---"] * (1 + len(good))]
    lines += [[str(key), *(_cell(result.get(key)) for result in good)] for key in keys]
    failed = [f"{result[title]}: no result: {result['error']}" for result in results if "error" in result]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines if good), "", *failed])


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_cell(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_cell, value))
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def make_parser(name: str, description: str | None, sizes: Sizes, argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a benchmark, with --quick and the options whose defaults depend on it."""
    raw = argparse.RawDescriptionHelpFormatter
    prog = f"python -m scripts.bench {name}"
    parser = argparse.ArgumentParser(prog, description=description, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="small and short, in less than a minute")
    for option, (whole, quick, text) in sizes.items():
        shown = f"{text} (default: {whole}{f'; with --quick {quick}' if quick != whole else ''})"
        default = quick if "--quick" in argv else whole
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(whole), default=default, help=shown)
    return parser


def versions(*packages: str) -> dict[str, str | None]:
    """Of Python, and of packages; None for one that is not installed."""
    installed = {found.name: found.version for found in distributions()}
    return {"python": platform.python_version(), **{name: installed.get(name) for name in packages}}


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def medians(rows: Collection[Row]) -> dict[str, float | None]:
    """Of every key that ends in `_s`, over the rows that have it."""
    names = sorted({name for row in rows for name in row if name.endswith("_s")})
    return {name: median(row[name] for row in rows if name in row) for name in names}


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed; 0 without any."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def spread(sample: dict[str, Any]) -> float:
    """Reward in [0, 1) that differs for every answer, so that every token is trained on."""
    return zlib.crc32(sample["completion"].encode()) / 2**32


class Processes:
    """The processes of a case, each with a log; a context manager that leaves none behind."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.folder, self.limit_s = folder, limit_s
        self.children: list[Child] = []
        self.may_end = False  # whether one that ends without an error is in order

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        children.stop(self.children, patience_s=10)

    def start(self, name: str, command: Sequence[str], **environment: str) -> Child:
        self.children.append(children.start(name, command, self.folder / f"{name}.log", environment))
        return self.children[-1]

    def check(self) -> None:
        """Raises CaseFailed when a process has ended that should not."""
        for child in self.children:
            if child.exit_code() not in (None, 0 if self.may_end else None):
                raise failed(f"{child.name} ended: {child.how_it_ended()}", self.folder)

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        """Wait for it. Raises CaseFailed when `limit_s` pass, or a process fails."""

        def look() -> bool:
            self.check()
            return done()

        try:
            wait_until(look, what, self.limit_s)
        except Hung as hung:
            raise failed(f"waited {self.limit_s:g} s for {what}", self.folder) from hung


def output_of(what: str, words: Sequence[str], limit_s: float, **environment: str) -> str:
    """What `python WORDS` prints, which ends well within `limit_s`. Raises CaseFailed."""
    with TemporaryDirectory() as folder, Processes(Path(folder), limit_s) as processes:
        processes.may_end = True
        child = processes.start(what, [sys.executable, *words], **environment)
        processes.wait(what, lambda: child.exit_code() == 0)
        return child.log_path.read_text(encoding="utf-8")


def cost_of(pid: int) -> dict[str, float]:
    """CPU seconds of a process since its start. Raises psutil.NoSuchProcess when it is gone.

    `total` is that of all threads, those that have ended included, and `system` what of it the kernel took. `main` is
    the main thread (Python, the service, the batches), `zmq_io` ZeroMQ's (sockets, framing, CURVE), `other` the rest.
    """
    process = psutil.Process(pid)
    times, main, zmq_io = process.cpu_times(), 0.0, 0.0
    for thread in process.threads():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended; the process's total has its seconds
            if thread.id == pid:
                main = thread.user_time + thread.system_time
            elif Path(f"/proc/{pid}/task/{thread.id}/comm").read_text(encoding="utf-8").startswith("ZMQbg/IO"):
                zmq_io += thread.user_time + thread.system_time
    total = times.user + times.system
    return {"total": total, "system": times.system, "main": main, "zmq_io": zmq_io, "other": total - main - zmq_io}


def resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def written_bytes(pid: int) -> int:
    """Bytes that a process gave to write() and its like; send() to sockets is not in it."""
    return int(psutil.Process(pid).io_counters().write_chars)
