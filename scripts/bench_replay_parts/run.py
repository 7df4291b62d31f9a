"""One case: starts replay, producers and learner, waits for the flow to be steady, and measures replay."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.schema import Config
from scripts.bench_replay_parts.board import ALL_STOP, LEARNER_STOPS, Board
from scripts.bench_replay_parts.process_cost import Cost, cost_of, resident_bytes, written_bytes
from scripts.bench_replay_parts.settings import Case, Options, config_of, write_config

RUN_ID = "bench"
READY = "replay ready at "
LOOK_S = 0.002
SAMPLE_S = 1.0
END_S = 15.0
SETTLE_S = 1.0
IDLE_S = 3.0
LOG_LINES = 15
COUNTED = ("steps", "tokens", "batch_bytes", "groups", "group_tokens", "group_bytes")
CURVE_POINTS = 60
MIB = 2**20


class CaseFailed(RuntimeError):
    """A case has no result; the message says why, with the last lines of the logs."""


@dataclass(slots=True)
class Running:
    """The processes of a case."""

    options: Options
    case: Case
    config: Config
    folder: Path
    board: Board
    processes: dict[str, subprocess.Popen[bytes]]

    @property
    def replay(self) -> int:
        """Process id of replay."""
        return self.processes["replay"].pid

    def start(self, name: str, *command: str) -> None:
        """Start a process whose output goes to a file."""
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    def log(self, name: str) -> str:
        """What a process has said so far."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def wait_until(self, what: str, done: Callable[[], bool], limit_s: float) -> None:
        """Raises CaseFailed when `limit_s` pass, or a process ends."""
        deadline = time.monotonic() + limit_s
        while not done():
            self.check()
            if time.monotonic() > deadline:
                raise CaseFailed(f"{self.case}: waited {limit_s:g} s for {what}\n{self.last_lines()}")
            time.sleep(LOOK_S)

    def check(self) -> None:
        """Raises CaseFailed when a process has ended or a group was not accepted."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                raise CaseFailed(f"{self.case}: {name} ended with code {process.returncode}\n{self.last_lines()}")
        if self.board["refused"]:
            raise CaseFailed(f"{self.case}: replay refused what producers sent\n{self.last_lines()}")

    def last_lines(self) -> str:
        """The end of every log."""
        return "\n".join(
            f"[{name}] {line}" for name in self.processes for line in self.log(name).splitlines()[-LOG_LINES:]
        )


def run_case(options: Options, case: Case) -> dict[str, Any]:
    """All numbers of one case. Raises CaseFailed and ConfigError."""
    with started(options, case) as running:
        return {**asdict(case), **(_held(running) if case.hold else _flow(running))}


@contextmanager
def started(options: Options, case: Case) -> Iterator[Running]:
    """Replay with all producers welcome and a learner that has joined; everything ends with the block."""
    folder = options.work / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(options.work / "runs", ignore_errors=True)
    folder.mkdir(parents=True)
    config = config_of(options, case, "case")
    write_config(config, folder / "config.yaml")
    options.load.write(folder / "load.json")
    board = Board(folder / "board", create=True)
    board["hold"] = int(case.hold)
    running = Running(options, case, config, folder, board, {})
    try:
        _start_all(running)
        yield running
        _end(running)
    finally:
        for process in running.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(options.work / "runs", ignore_errors=True)


def _start_all(running: Running) -> None:
    options, folder = running.options, running.folder
    family = ["--config", str(folder / "config.yaml"), "--parent", str(os.getpid())]
    profiler = ["-m", "cProfile", "-o", str(folder / "replay.profile")] if options.profile else []
    running.start("replay", *profiler, "-m", "replay.main", *family, "--run-id", RUN_ID)
    running.wait_until("replay to be ready", lambda: READY in running.log("replay"), options.limit_s)
    address = running.log("replay").partition(READY)[2].split()[0]
    there = [*family, "--address", address, "--board", str(folder / "board")]
    parts = "scripts.bench_replay_parts"
    count = str(running.case.producers)
    load = str(folder / "load.json")
    running.start("producers", "-m", f"{parts}.producers", *there, "--run-id", RUN_ID, "--load", load, "--count", count)
    running.wait_until(
        f"{count} producers to join", lambda: running.board["joined"] == running.case.producers, options.limit_s
    )
    every = str(options.checkpoint_every)
    if running.case.hold:
        time.sleep(SETTLE_S)
        running.board["resting_bytes"] = resident_bytes(running.replay)
    running.start("learner", "-m", f"{parts}.learner", *there, "--checkpoint-every", every)


def _end(running: Running) -> None:
    """Everybody ends in good order: the learner's Goodbye ends the run, and replay tells the producers."""
    for name, stage in (("learner", LEARNER_STOPS), ("replay", LEARNER_STOPS), ("producers", ALL_STOP)):
        running.board["stop"] = stage
        try:
            code = running.processes[name].wait(END_S)
        except subprocess.TimeoutExpired as error:
            message = f"{running.case}: {name} did not end within {END_S:g} s"
            raise CaseFailed(f"{message}\n{running.last_lines()}") from error
        if code != 0:
            raise CaseFailed(f"{running.case}: {name} ended with code {code}\n{running.last_lines()}")


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything that is counted, at the moment of a commit."""

    at: float
    cost: Cost
    written: int
    counts: dict[str, int]

    @classmethod
    def at_next_commit(cls, running: Running) -> "Reading":
        """Read when a step has just been committed, so that a window holds whole steps."""
        step = running.board["steps"]
        running.wait_until("a commit", lambda: running.board["steps"] > step, running.options.limit_s)
        pid = running.replay
        return cls(time.monotonic(), cost_of(pid), written_bytes(pid), running.board.read(COUNTED))


def _flow(running: Running) -> dict[str, Any]:
    """Full load for `seconds`."""
    options = running.options
    warm = options.warmup_steps
    running.wait_until(f"step {warm}", lambda: running.board["steps"] >= warm, options.limit_s)
    before = Reading.at_next_commit(running)
    resident: list[int] = []
    while time.monotonic() < before.at + options.seconds:
        running.check()
        resident.append(resident_bytes(running.replay))
        time.sleep(min(SAMPLE_S, options.seconds / 4))
    after = Reading.at_next_commit(running)
    cost = after.cost.since(before.cost)
    counts = {field: after.counts[field] - before.counts[field] for field in COUNTED}
    tokens = counts["tokens"]
    return {
        "seconds": round(after.at - before.at, 2),
        "steps": counts["steps"],
        "tokens": tokens,
        "tokens_per_cpu_second": round(tokens / cost.total),
        "groups_per_cpu_second": round(counts["steps"] * options.load.groups_per_step / cost.total, 1),
        "tokens_per_second": round(tokens / (after.at - before.at)),
        "cpu_seconds": round(cost.total, 2),
        "cpu_seconds_main": round(cost.main, 2),
        "cpu_seconds_zmq_io": round(cost.zmq_io, 2),
        "cpu_seconds_other": round(cost.total - cost.main - cost.zmq_io, 2),
        "cpu_seconds_system": round(cost.system, 2),
        "bytes_per_token_in": round(counts["group_bytes"] / counts["group_tokens"], 2),
        "bytes_per_token_out": round(counts["batch_bytes"] / tokens, 2),
        "bytes_per_token_written": round((after.written - before.written) / tokens, 2),
        **memory(resident),
    }


def memory(resident: list[int]) -> dict[str, Any]:
    """Whether resident memory grows: means of the quarters of the window, in MiB, and the last against the second."""
    quarter = max(1, len(resident) // 4)
    parts = [resident[i * quarter : (i + 1) * quarter] or resident[-quarter:] for i in range(4)]
    means = [round(sum(part) / len(part) / MIB, 1) for part in parts]
    step = max(1, len(resident) // CURVE_POINTS)
    return {
        "rss_mib_max": round(max(resident) / MIB, 1),
        "rss_mib_by_quarter": means,
        "rss_mib_growth": round(means[3] - means[1], 1),
        "rss_mib_curve": [round(value / MIB, 1) for value in resident[::step]],
    }


def _held(running: Running) -> dict[str, Any]:
    """Memory of a full buffer over the bytes of the groups in it."""
    full = (running.case.lag + 1) * running.options.load.groups_per_step
    running.wait_until(f"{full} groups", lambda: running.board["groups"] == full, running.options.limit_s)
    time.sleep(SETTLE_S)
    resting, held = running.board["resting_bytes"], resident_bytes(running.replay)
    queued = running.board["group_bytes"]
    before, started = cost_of(running.replay), time.monotonic()
    time.sleep(IDLE_S)
    idle = cost_of(running.replay).since(before).total / (time.monotonic() - started)
    return {
        "groups": full,
        "queued_mib": round(queued / MIB, 1),
        "rss_mib_empty": round(resting / MIB, 1),
        "rss_mib_full": round(held / MIB, 1),
        "memory_over_queued": round((held - resting) / queued, 3),
        "idle_cpu_ms_per_second": round(1000 * idle, 1),
    }
