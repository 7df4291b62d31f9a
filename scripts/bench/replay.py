"""`python -m scripts.bench replay`: what the data plane costs, in tokens per CPU-second of the replay process.

Starts the real replay process (`python -m replay.main`) between simulated rollout servers that answer every lease with
a prepared group and a learner rank that takes and commits every batch (scripts/bench/load.py). Counted are the CPU
seconds of the replay process alone, all its threads, from /proc. A token is counted once, when its step is committed.
docs/benchmarks/replay.md has examples.

Standard output gets a table and, as its last line, one object of JSON with the main case's `tokens_per_cpu_second`.
"""

import argparse
import os
import platform
import pstats
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zmq

from configs.loading import ConfigError, dump
from configs.schema import Config
from scripts.bench import core, load
from scripts.bench.core import CaseFailed, Cost, Processes, cost_of, resident_bytes, written_bytes
from scripts.bench.load import CASES, MAIN, QUICK_CASES, QUICK_LOAD, Case, Load
from scripts.chaos.report import conclude

READY = "replay ready at "
LOOK_S, SAMPLE_S = 0.002, 1.0
END_S = 15.0
SETTLE_S, IDLE_S = 1.0, 3.0
CURVE_POINTS = 60
MIB = 2**20
PROFILE_LINES = 40


class Running(Processes):
    """The replay process of a case, the threads around it, and what they have counted."""

    def __init__(self, options: argparse.Namespace, case: Case) -> None:
        super().__init__(options.work / "case")
        self.options, self.case = options, case
        self.counts = load.Counts()
        self.learner_over, self.producers_over = threading.Event(), threading.Event()
        self.threads = ThreadPoolExecutor(2)
        self.ends: list[Future[None]] = []
        self.resting_bytes = 0
        """Resident memory of replay before any group came."""

    def __exit__(self, *error: object) -> None:
        self.learner_over.set()
        self.producers_over.set()
        super().__exit__(*error)
        self.threads.shutdown()  # a learner that waits for a batch notices that replay is silent

    def check(self) -> None:
        """Raises CaseFailed when replay has ended, or a thread has failed."""
        super().check()
        for end in self.ends:
            if end.done() and end.exception() is not None:
                raise self.fail(str(end.exception()))

    def start_all(self, config: Config) -> None:
        """Replay, producers that are all welcome, a learner that joins."""
        options, folder, count = self.options, self.folder, self.case.producers
        profiler = ["-m", "cProfile", "-o", str(folder / "replay.profile")] if options.profile else []
        words = [sys.executable, *profiler, "-m", "replay.main", "--config", str(folder / "config.yaml")]
        self.replay = self.start("replay", [*words, "--parent", str(os.getpid()), "--run-id", load.RUN_ID])
        log = self.replay.log_path
        self.wait("replay to be ready", lambda: READY in log.read_text())
        address = log.read_text().partition(READY)[2].split()[0]
        producers = load.Producers(config, address, self.counts, load.prepare(options.load), count)
        self.ends.append(self.threads.submit(producers.run, self.producers_over))
        self.wait(f"{count} producers to join", lambda: self.counts.joined == count)
        if self.case.hold:
            time.sleep(SETTLE_S)
            self.resting_bytes = resident_bytes(self.replay.pid)
        learner = load.Learner(config, address, self.counts, options.checkpoint_every)
        self.ends.append(self.threads.submit(learner.run, self.learner_over, self.case.hold))

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        self.wait_until(what, done, self.options.limit_s, LOOK_S)

    def end_all(self) -> None:
        """End in good order: the learner's Goodbye ends the run, and replay says so to the producers."""
        self.may_end = True
        self.learner_over.set()
        self.wait_until("replay to end", self.ended, END_S)
        self.producers_over.set()
        self.wait_until("the threads to end", lambda: all(end.done() for end in self.ends), END_S)


def run_case(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """All numbers of one case; every process ends with it. Raises CaseFailed and ConfigError."""
    folder, config = options.work / "case", load.config_of(options, case)
    for old in (folder, options.work / "runs"):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    try:
        with Running(options, case) as running:
            running.start_all(config)
            found = _held(running) if case.hold else _flow(running)
            running.end_all()
            return found
    finally:
        shutil.rmtree(options.work / "runs", ignore_errors=True)


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
        step = running.counts.steps
        running.wait("a commit", lambda: running.counts.steps > step)
        pid = running.replay.pid
        return cls(time.monotonic(), cost_of(pid), written_bytes(pid), asdict(running.counts))


def _flow(running: Running) -> dict[str, Any]:
    options = running.options
    warm = options.warmup_steps
    running.wait(f"step {warm}", lambda: running.counts.steps >= warm)
    before = Reading.at_next_commit(running)
    resident: list[int] = []
    while time.monotonic() < before.at + options.seconds:
        running.check()
        resident.append(resident_bytes(running.replay.pid))
        time.sleep(min(SAMPLE_S, options.seconds / 4))
    return flow_of(before, Reading.at_next_commit(running), resident, options.load)


def flow_of(before: Reading, after: Reading, resident: list[int], sent: Load) -> dict[str, Any]:
    """What lies between two readings."""
    cost, seconds = after.cost.since(before.cost), after.at - before.at
    counts = {field: count - before.counts[field] for field, count in after.counts.items()}
    tokens = counts["tokens"]
    return {
        "seconds": round(seconds, 2),
        "steps": counts["steps"],
        "tokens": tokens,
        "tokens_per_cpu_second": round(tokens / cost.total),
        "groups_per_cpu_second": round(counts["steps"] * sent.groups_per_step / cost.total, 1),
        "tokens_per_second": round(tokens / seconds),
        "cpu_seconds": round(cost.total, 2),
        **{f"cpu_seconds_{part}": round(getattr(cost, part), 2) for part in ("main", "zmq_io", "other", "system")},
        "bytes_per_token_in": round(counts["group_bytes"] / counts["group_tokens"], 2),
        "bytes_per_token_out": round(counts["batch_bytes"] / tokens, 2),
        "bytes_per_token_written": round((after.written - before.written) / tokens, 2),
        **memory(resident),
    }


def memory(resident: list[int]) -> dict[str, Any]:
    """Whether resident memory grows: means of the quarters of the window, in MiB, and the last against the second."""
    mib = [value / MIB for value in resident]
    quarter = max(1, len(mib) // 4)
    means = [round(statistics.mean(mib[i * quarter :][:quarter] or mib[-quarter:]), 1) for i in range(4)]
    return {
        "rss_mib_max": round(max(mib), 1),
        "rss_mib_by_quarter": means,
        "rss_mib_growth": round(means[3] - means[1], 1),
        "rss_mib_curve": [round(value, 1) for value in mib[:: max(1, len(mib) // CURVE_POINTS)]],
    }


def _held(running: Running) -> dict[str, Any]:
    """Memory of a full buffer over the bytes of the groups in it."""
    counts, pid = running.counts, running.replay.pid
    full = (running.case.lag + 1) * running.options.load.groups_per_step
    running.wait(f"{full} groups", lambda: counts.groups == full)
    time.sleep(SETTLE_S)
    held, queued = resident_bytes(pid), counts.group_bytes
    before, began = cost_of(pid), time.monotonic()
    time.sleep(IDLE_S)
    idle = cost_of(pid).since(before).total / (time.monotonic() - began)
    return held_of(full, queued, running.resting_bytes, held, idle)


def held_of(groups: int, queued: int, resting: int, held: int, idle: float) -> dict[str, Any]:
    """Bytes of groups that came, resident memory without and with them, and CPU seconds a second at rest."""
    return {
        "groups": groups,
        "queued_mib": round(queued / MIB, 1),
        "rss_mib_empty": round(resting / MIB, 1),
        "rss_mib_full": round(held / MIB, 1),
        "memory_over_queued": round((held - resting) / queued, 3),
        "idle_cpu_ms_per_second": round(1000 * idle, 1),
    }


def report(results: list[dict[str, Any]], profiled: bool) -> dict[str, Any]:
    """The last line: the main case at the top, all of them in `results`."""
    top = ("tokens_per_cpu_second", "groups_per_cpu_second", "bytes_per_token_in", "rss_mib_growth", "error")
    held = [result["memory_over_queued"] for result in results if "memory_over_queued" in result]
    packages = {name: version(name) for name in ("pyzmq", "numpy", "msgpack")}
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    hardware = {"cpu": cpu[1] if cpu else platform.machine(), "cores": os.cpu_count(), "kernel": platform.release()}
    return {
        **{key: results[0][key] for key in top if key in results[0]},
        **({"memory_over_queued": held[0]} if held else {}),
        "profiled": profiled,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": hardware,
        "versions": {"python": platform.python_version(), "libzmq": zmq.zmq_version(), **packages},
        "results": results,
    }


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Case]]:
    parser = core.make_parser("replay", __doc__, {"seconds": (20.0, 2.0, "of each case")}, argv)
    parser.add_argument("--minutes", type=float, help="the main case alone, for so long")
    parser.add_argument("--profile", action="store_true", help="the main case alone, under cProfile")
    parser.add_argument("--producers", type=int, help="one case: so many producers")
    parser.add_argument("--no-curve", action="store_true", help="one case: without keys")
    parser.add_argument("--fsync", choices=["every", "interval", "never"], help="one case: replay.fsync")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=120.0, help="of every wait (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-replay"), help="model, prompts, keys and run")
    parser.add_argument("--out", type=Path, help="JSON file for the report")
    args = parser.parse_args(argv)
    cases = QUICK_CASES if args.quick else CASES
    if args.minutes or args.profile or args.producers or args.no_curve or args.fsync:
        producers = args.producers if args.producers is not None else MAIN.producers
        cases = [Case(producers=producers, curve=not args.no_curve, fsync=args.fsync or MAIN.fsync)]
    if args.minutes:
        args.seconds = 60 * args.minutes
    if not args.seconds > 0 or args.checkpoint_every < 1 or cases[0].producers < 1:
        parser.error("--seconds, --minutes, --checkpoint-every and --producers: more than 0 each")
    args.load = QUICK_LOAD if args.quick else Load()
    args.work, args.warmup_steps = args.work.absolute(), 4 if args.quick else 10
    return args, cases


def measure(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """The result of a case with what the case is; one that failed has an `error`."""
    core.say(str(case))
    try:
        return {"case": str(case), **asdict(case), **run_case(options, case)}
    except (CaseFailed, ConfigError) as error:
        core.say(str(error))
        return {"case": str(case), "error": str(error).splitlines()[0]}


def command(argv: Sequence[str]) -> int:
    """1 when a case has no result."""
    options, cases = parse(argv)
    load.write_files(options)
    results: list[dict[str, Any]] = []
    for case in cases:
        results.append(measure(options, case))
        if options.out is not None:
            core.write_json(options.out, report(results, options.profile))
    if options.profile and "error" not in results[0]:
        stats = pstats.Stats(str(options.work / "case" / "replay.profile"), stream=sys.stderr)
        stats.sort_stats("tottime").print_stats(PROFILE_LINES)
    sys.stdout.write(core.table(results, "case") + "\n\n")
    return conclude(report(results, options.profile), (), in_order=not any("error" in result for result in results))
