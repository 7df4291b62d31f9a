"""`python -m tests.security.fuzz --frames 1000000 --seed 1`: what peers can send does not stop anybody.

Valid messages of every kind are changed (bits, lengths, frames, values, numbers, nesting, dtypes), at least half of
them with the right checksum for what they became, and sent through real sockets to each kind of socket of a run, with
the code that reads it behind it, in a process of its own. The same seed makes the same messages. The last line is JSON:

    {"frames": {...}, "crashes": 0, "unhandled": 0, "rss_growth_bytes": ..., "cap_bytes": ..., ...}

crashes: processes that died. unhandled: exceptions that no reader documents. rss_growth_bytes: the most that a process
grew after the first fifth of its frames. The exit code is 0 when none of these is too much.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.security.fuzz.worker import TARGETS

ROOT = Path(__file__).parents[3]
CAP_BYTES = 64 * 1024 * 1024
QUICK_FRAMES = 4000
SECONDS_PER_FRAME = 0.005
"""A process that takes longer than this, and START_S, hangs."""
START_S = 120.0
TAIL = 2000
PER_TARGET = ("frames", "messages", "accepted")


def attack(target: str, frames: int, seed: int) -> dict[str, Any]:
    """Result of one process; `crash` says how it died, if it did."""
    command = [sys.executable, "-m", "tests.security.fuzz.worker", target, str(frames), str(seed)]
    limit_s = START_S + frames * SECONDS_PER_FRAME
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"crash": f"it hung: not done within {limit_s:.0f} s", "frames": 0}
    if done.returncode != 0:
        return {"crash": f"exit code {done.returncode}: {done.stderr[-TAIL:]}", "frames": 0}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.security.fuzz", description=__doc__, formatter_class=raw)
    parser.add_argument("--frames", type=int, default=1_000_000, help="for each kind of socket (default: 1000000)")
    parser.add_argument("--seed", type=int, default=1, help="of the messages (default: 1)")
    parser.add_argument("--targets", default=",".join(TARGETS), help="kinds of socket, by commas (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_FRAMES} frames each")
    args = parser.parse_args(arguments)
    targets = [name.strip() for name in args.targets.split(",")]
    if unknown := sorted(set(targets) - set(TARGETS)):
        parser.error(f"--targets {unknown[0]!r}: there are {', '.join(TARGETS)}")
    results = {}
    for target in targets:
        started = time.monotonic()
        results[target] = attack(target, QUICK_FRAMES if args.quick else args.frames, args.seed)
        print(f"{target}, {time.monotonic() - started:.0f} s: {json.dumps(results[target], indent=1)}", flush=True)
    found = list(results.values())
    summary = {
        **{key: {name: result.get(key, 0) for name, result in results.items()} for key in PER_TARGET},
        "resealed": min(result.get("resealed", 0.0) for result in found),
        "crashes": sum("crash" in result for result in found),
        "unhandled": sum(len(result.get("unhandled", [])) for result in found),
        "rss_growth_bytes": max(result.get("rss_growth_bytes", 0) for result in found),
        "cap_bytes": CAP_BYTES,
        "cpu_s": round(sum(result.get("cpu_s", 0.0) for result in found), 1),
        "seed": args.seed,
    }
    print(json.dumps(summary), flush=True)
    return int(bool(summary["crashes"] or summary["unhandled"] or summary["rss_growth_bytes"] > CAP_BYTES))


if __name__ == "__main__":
    sys.exit(main())
