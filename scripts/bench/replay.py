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
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import zmq

from configs.loading import dump
from configs.schema import Config
from scripts.bench import core, load, slow_disk
from scripts.bench.core import Processes, cost_of, resident_bytes, written_bytes
from scripts.bench.load import CASES, GROUPS_PER_STEP, QUICK_CASES, Case
from scripts.chaos.report import conclude

READY = "replay ready at "
SAMPLE_S, SETTLE_S, IDLE_S = 1.0, 1.0, 3.0
MIB = 2**20
PARTS = ("cpu_seconds_main", "cpu_seconds_zmq_io", "cpu_seconds_other", "cpu_seconds_system")


class Running(Processes):
    """The replay process of a case, the threads around it, and what they have counted."""

    def __init__(self, options: argparse.Namespace, case: Case) -> None:
        super().__init__(options.work / "case", options.limit_s)
        self.options, self.case, self.counts = options, case, load.Counts()
        self.learner_over, self.producers_over = threading.Event(), threading.Event()
        self.times = load.no_times()
        self.threads, self.ends = ThreadPoolExecutor(3), list[Future[None]]()

    def __exit__(self, *error: object) -> None:
        self.learner_over.set()
        self.producers_over.set()
        super().__exit__(*error)
        self.threads.shutdown()  # a learner that waits for a batch notices that replay is silent

    def check(self) -> None:
        """Raises CaseFailed when replay or a thread has failed."""
        super().check()
        for end in self.ends:
            if end.done() and end.exception() is not None:
                raise core.failed(str(end.exception()), self.folder)

    def start_all(self, config: Config) -> None:
        """Replay, producers that are all welcome, a learner that joins."""
        options, folder, count = self.options, self.folder, self.case.producers
        slow = self.case.sync_ms is not None
        program = ["scripts.bench.slow_disk", str(self.case.sync_ms)] if slow else ["replay.main"]
        words = [sys.executable, "-m", *program, "--config", str(folder / "config.yaml")]
        self.replay = self.start("replay", [*words, "--parent", str(os.getpid()), "--run-id", load.RUN_ID])
        log = self.replay.log_path
        self.wait("replay to be ready", lambda: READY in log.read_text())
        address = log.read_text().partition(READY)[2].split()[0]
        producers = load.Producers(config, address, self.counts, self.case)
        self.ends.append(self.threads.submit(producers.run, self.producers_over))
        self.wait(f"{count} producers to join", lambda: self.counts.joined == count)
        if self.case.hold:
            time.sleep(SETTLE_S)
        self.resting_bytes = resident_bytes(self.replay.pid)  # no group has come yet
        learner = load.Learner(config, address, self.counts, options.checkpoint_every, self.times)
        if slow:
            learner.train_s = load.TRAIN_S
            self.ends.append(self.threads.submit(load.Viewer(config, address, self.times).run, self.producers_over))
        self.ends.append(self.threads.submit(learner.run, self.learner_over, self.case.hold))

    def end_all(self) -> None:
        """End in good order: the learner's Goodbye ends the run, and replay says so to the producers."""
        self.may_end = True
        self.learner_over.set()
        self.wait("replay to end", lambda: self.replay.exit_code() is not None)
        self.producers_over.set()
        self.wait("the threads to end", lambda: all(end.done() for end in self.ends))


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


def reading(running: Running) -> dict[str, float]:
    """Everything that is counted, when a step has just been committed, so that a window holds whole steps."""
    step = running.counts.steps
    running.wait("a commit", lambda: running.counts.steps > step)
    pid = running.replay.pid
    cost = {f"cpu_seconds_{part}": seconds for part, seconds in cost_of(pid).items()}
    return {"seconds": time.monotonic(), "written": written_bytes(pid), **asdict(running.counts), **cost}


def _flow(running: Running) -> dict[str, Any]:
    options = running.options
    running.wait(f"step {options.warmup_steps}", lambda: running.counts.steps >= options.warmup_steps)
    before = reading(running)
    for seen in running.times.values():
        seen.clear()
    resident: list[int] = []
    while time.monotonic() < before["seconds"] + options.seconds:
        running.check()
        resident.append(resident_bytes(running.replay.pid))
        time.sleep(min(SAMPLE_S, options.seconds / 4))
    times = times_of(running.times) if options.sync_ms else {}
    return flow_of(before, reading(running), resident) | times


def flow_of(before: dict[str, float], after: dict[str, float], resident: list[int]) -> dict[str, Any]:
    """What lies between two readings."""
    found = {name: after[name] - before[name] for name in after}
    tokens, cpu = found["tokens"], found["cpu_seconds_total"]
    return {
        "seconds": round(found["seconds"], 2),
        "steps": found["steps"],
        "tokens": tokens,
        "tokens_per_cpu_second": round(tokens / cpu),
        "groups_per_cpu_second": round(found["steps"] * GROUPS_PER_STEP / cpu, 1),
        "tokens_per_second": round(tokens / found["seconds"]),
        "cpu_seconds": round(cpu, 2),
        **{name: round(found[name], 2) for name in PARTS},
        "bytes_per_token_in": round(found["group_bytes"] / found["group_tokens"], 2),
        "bytes_per_token_out": round(found["batch_bytes"] / tokens, 2),
        "bytes_per_token_written": round(found["written"] / tokens, 2),
        **memory(resident),
    }


def times_of(times: load.Times) -> dict[str, float]:
    """Mean, median and 99th percentile of each in milliseconds, with and without the latency, and mean over mean."""
    found: dict[str, float] = {}
    for name, seen in ((name, seen) for name, seen in times.items() if seen):
        slow, fast = ([s for at, s in seen if slow_disk.is_slow(at) == is_slow] for is_slow in (True, False))
        for kind, values in ((f"{name}_ms", fast), (f"{name}_ms_slow", slow)):
            shares = {
                "": statistics.mean(values),
                "_p50": core.quantile(values, 0.5),
                "_p99": core.quantile(values, 0.99),
            }
            found |= {f"{kind}{share}": round(1000 * value, 2) for share, value in shares.items()}
        found[f"{name}_slow_over_fast"] = round(statistics.mean(slow) / statistics.mean(fast), 3)
    return found


def memory(resident: list[int]) -> dict[str, Any]:
    """Whether resident memory grows: means of the quarters of the window, in MiB, and the last against the second."""
    mib = [value / MIB for value in resident]
    quarter = max(1, len(mib) // 4)
    means = [round(statistics.mean(mib[i * quarter :][:quarter] or mib[-quarter:]), 1) for i in range(4)]
    return {
        "rss_mib_max": round(max(mib), 1),
        "rss_mib_by_quarter": means,
        "rss_mib_growth": round(means[3] - means[1], 1),
    }


def _held(running: Running) -> dict[str, Any]:
    """Memory of a full buffer over the bytes of the groups in it."""
    counts, pid = running.counts, running.replay.pid
    full = (running.case.lag + 1) * GROUPS_PER_STEP
    running.wait(f"{full} groups", lambda: counts.groups == full)
    time.sleep(SETTLE_S)
    held, queued = resident_bytes(pid), counts.group_bytes
    before, began = cost_of(pid)["total"], time.monotonic()
    time.sleep(IDLE_S)
    idle = (cost_of(pid)["total"] - before) / (time.monotonic() - began)
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


def report(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The last line: the main case at the top, all of them in `results`."""
    top = ("tokens_per_cpu_second", "groups_per_cpu_second", "bytes_per_token_in", "rss_mib_growth", "error")
    held = [result["memory_over_queued"] for result in results if "memory_over_queued" in result]
    ratios = {
        result["fsync"]: {name: result[f"{name}_slow_over_fast"] for name in load.no_times()}
        for result in results
        if "batch_slow_over_fast" in result
    }
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        **{key: results[0][key] for key in top if key in results[0]},
        **({"memory_over_queued": held[0]} if held else {}),
        **({"slow_over_fast": ratios} if ratios else {}),
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {
            "cpu": cpu[1] if cpu else platform.machine(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
        },
        "versions": {**core.versions("pyzmq", "numpy", "msgpack"), "libzmq": zmq.zmq_version()},
        "results": results,
    }


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[Case]]:
    parser = core.make_parser("replay", __doc__, {"seconds": (20.0, 2.0, "of each case")}, argv)
    parser.add_argument("--minutes", type=float, help="the main case alone, for so long")
    one: Any = {"default": argparse.SUPPRESS}
    parser.add_argument("--producers", type=int, **one, help="one case: so many producers")
    parser.add_argument("--no-curve", dest="curve", action="store_false", **one, help="one case: without keys")
    parser.add_argument("--fsync", choices=["every", "interval", "never"], **one, help="one case: replay.fsync")
    parser.add_argument("--sync-ms", type=float, help="a disk whose syncs take so much longer, now and then")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=120.0, help="of every wait (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-replay"), help="model, prompts, keys and run")
    parser.add_argument("--out", type=Path, help="JSON file for the report")
    args = parser.parse_args(argv)
    chosen = {name: value for name, value in vars(args).items() if name in ("producers", "curve", "fsync")}
    cases = QUICK_CASES if args.quick else CASES
    if args.minutes or chosen:
        cases = [Case(**chosen)]
    if args.sync_ms is not None:
        modes = [chosen["fsync"]] if "fsync" in chosen else ["interval", "every"]
        few = {"producers": 16} | chosen  # this process shares the machine's cores with replay
        cases = [Case(**few | {"fsync": mode}, sync_ms=args.sync_ms) for mode in modes]
    if args.minutes:
        args.seconds = 60 * args.minutes
    if not args.seconds > 0 or args.checkpoint_every < 1 or cases[0].producers < 1:
        parser.error("--seconds, --minutes, --checkpoint-every and --producers: more than 0 each")
    args.work, args.warmup_steps = args.work.absolute(), 4 if args.quick else 10
    return args, cases


def measure(options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """The result of a case with what the case is; one that failed has an `error`."""
    core.say(str(case))
    result: dict[str, Any] = {"case": str(case)}
    with core.noted(result, "error"):
        result |= asdict(case) | run_case(options, case)
    return result


def command(argv: Sequence[str]) -> int:
    """1 when a case has no result."""
    options, cases = parse(argv)
    load.write_files(options)
    results: list[dict[str, Any]] = []
    for case in cases:
        results.append(measure(options, case))
        if options.out is not None:
            core.write_json(options.out, report(results))
    sys.stdout.write(core.table(results, "case") + "\n\n")
    return conclude(report(results), (), in_order=not any("error" in result for result in results))
