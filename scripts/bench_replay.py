"""`python -m scripts.bench_replay`: what the data plane costs, in tokens per CPU-second of the replay process.

Starts the real replay process (`python -m replay.main`), simulated rollout servers that answer every lease with a
prepared group (lognormal lengths, median 2k, groups of 8, a version a token), and a learner rank that takes and commits
every batch. Counted are the CPU seconds of the replay process alone, all its threads, from /proc; producers and learner
are other processes. A token is counted once, when its step is committed: it was then received, decoded, checked,
journalled, put into a batch and sent out.

    python -m scripts.bench_replay                    all cases: CURVE, fsync, 1 to 1,000 producers, memory
    python -m scripts.bench_replay --quick            the same cases, short ones: under a minute
    python -m scripts.bench_replay --minutes 10       the main case alone, for that long: does memory grow?
    python -m scripts.bench_replay --profile          the main case under cProfile: what the main thread does

Standard output gets a table and, as its last line, one object of JSON with the main case's `tokens_per_cpu_second`.
"""

import argparse
import json
import os
import platform
import pstats
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

from configs.loading import ConfigError
from scripts.bench_replay_parts.run import CaseFailed, run_case
from scripts.bench_replay_parts.settings import Case, Load, Options, prepare
from scripts.bench_replay_parts.table import table

MAIN = Case()
CASES = [
    MAIN,
    Case(curve=False),
    Case(fsync="every"),
    Case(fsync="never"),
    Case(producers=1),
    Case(producers=10),
    Case(producers=300),
    Case(producers=1000),
    Case(lag=8, hold=True),
    Case(producers=1000, lag=8, hold=True),
]
QUICK_CASES = [MAIN, Case(curve=False), Case(fsync="every"), Case(producers=300), Case(lag=2, hold=True)]
QUICK_LOAD = Load(pool=48, rows=1024)
PROFILE_LINES = 40


def measure(options: Options, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """One result a case as soon as it is there; a case that failed has an `error`."""
    prepare(options)
    for case in cases:
        say(str(case))
        try:
            result = run_case(options, case)
        except (CaseFailed, ConfigError) as error:
            say(str(error))
            result = {"case": str(case), "error": str(error).splitlines()[0]}
        yield {"case": str(case), **result}


def report(results: list[dict[str, Any]], options: Options) -> dict[str, Any]:
    """The last line: the main case at the top, all of them in `results`."""
    main_case = results[0]
    top = ("tokens_per_cpu_second", "groups_per_cpu_second", "bytes_per_token_in", "rss_mib_growth", "error")
    held = [result["memory_over_queued"] for result in results if "memory_over_queued" in result]
    return {
        **{key: main_case[key] for key in top if key in main_case},
        **({"memory_over_queued": held[0]} if held else {}),
        "profiled": options.profile,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count(), "kernel": platform.release()},
        "versions": {
            "python": platform.python_version(),
            "pyzmq": zmq.__version__,
            "libzmq": zmq.zmq_version(),
            "numpy": np.__version__,
            "msgpack": ".".join(map(str, msgpack.version)),
        },
        "results": results,
    }


def cpu_name() -> str:
    """Model name of the processor, as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def show_profile(path: Path) -> None:
    """The costliest functions of replay's main thread, on standard error."""
    stats = pstats.Stats(str(path), stream=sys.stderr)
    stats.sort_stats("tottime").print_stats(PROFILE_LINES)


def parse(argv: Sequence[str] | None) -> tuple[Options, list[Case], Path | None]:
    """The options of the command. Exits on what cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench_replay", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases: under a minute")
    parser.add_argument("--minutes", type=float, help="the main case alone, for so long")
    parser.add_argument("--seconds", type=float, help="of each case (default: 20; with --quick 2)")
    parser.add_argument("--profile", action="store_true", help="the main case alone, under cProfile")
    parser.add_argument("--producers", type=int, help="one case: so many producers")
    parser.add_argument("--no-curve", action="store_true", help="one case: without keys")
    parser.add_argument("--fsync", choices=["every", "interval", "never"], help="one case: replay.fsync")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=120.0, help="of every wait (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-replay"), help="model, prompts, keys and run")
    parser.add_argument("--out", type=Path, help="JSON file for the report")
    args = parser.parse_args(argv)
    one_case = args.minutes or args.profile or args.producers or args.no_curve or args.fsync
    cases = QUICK_CASES if args.quick else CASES
    if one_case:
        producers = args.producers if args.producers is not None else MAIN.producers
        cases = [Case(producers=producers, curve=not args.no_curve, fsync=args.fsync or MAIN.fsync)]
    seconds = args.seconds or (60 * args.minutes if args.minutes else 2.0 if args.quick else 20.0)
    if not seconds > 0 or args.checkpoint_every < 1 or cases[0].producers < 1:
        parser.error("--seconds, --minutes, --checkpoint-every and --producers: more than 0 each")
    return (
        Options(
            load=QUICK_LOAD if args.quick else Load(),
            work=args.work.absolute(),
            seconds=seconds,
            warmup_steps=4 if args.quick else 10,
            checkpoint_every=args.checkpoint_every,
            limit_s=args.limit_s,
            profile=args.profile,
        ),
        cases,
        args.out,
    )


def say(text: str) -> None:
    """A line for the person who waits; standard output is for results."""
    sys.stderr.write(f"bench_replay: {text}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 1 when a case has no result."""
    options, cases, out = parse(argv)
    results = []
    for result in measure(options, cases):
        results.append(result)
        say(table([result]).splitlines()[-1])
        document = report(results, options)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if options.profile and "error" not in results[0]:
        show_profile(options.work / "case" / "replay.profile")
    sys.stdout.write(table(results) + "\n\n" + json.dumps(document) + "\n")
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
