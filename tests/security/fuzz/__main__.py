"""`python -m tests.security.fuzz --frames 1000000 --seed 1`: what peers can send does not stop anybody.

Valid messages of every kind are changed (bits, lengths, frames, values, numbers, nesting, dtypes) and sent through real
sockets to each kind of socket of a run, with the code that reads it in a run behind it (targets.py says
what that is). At least half of the changed messages carry the right checksum for what they became, so that what stands
behind the checksum is reached.

Each kind of socket is a process of its own. The last line is JSON:

    {"frames": {...}, "crashes": 0, "unhandled": 0, "rss_growth_bytes": ..., "cap_bytes": ..., ...}

crashes: processes that died. unhandled: exceptions that no reader documents. rss_growth_bytes: the most that a process
grew after the first fifth of its frames. The exit code is 0 when nothing crashed, nothing was unhandled, and none grew
above the cap. The same seed makes the same messages.
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


def attack(target: str, frames: int, seed: int) -> dict[str, Any]:
    """Result of one process; `crash` says how it died, if it did."""
    command = [sys.executable, "-m", "tests.security.fuzz.worker", "--target", target]
    command += ["--frames", str(frames), "--seed", str(seed)]
    limit_s = START_S + frames * SECONDS_PER_FRAME
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"crash": f"it hung: not done within {limit_s:.0f} s", "frames": 0}
    if done.returncode != 0:
        return {"crash": f"exit code {done.returncode}: {done.stderr[-TAIL:]}", "frames": 0}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def say(text: str) -> None:
    """One line on standard output, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def describe(target: str, result: dict[str, Any], seconds: float) -> None:
    """What one process found."""
    if "crash" in result:
        say(f"{target}: CRASHED: {result['crash']}")
        return
    say(
        f"{target}: {result['frames']} frames in {result['messages']} messages, {result['accepted']} of them whole;"
        f" {result['resealed']:.0%} of the changed ones with a right checksum; {len(result['unhandled'])} unhandled;"
        f" {result['rss_growth_bytes'] / 2**20:.1f} MiB more; {result['cpu_s']} CPU seconds, {seconds:.0f} s"
    )
    for found in result["unhandled"]:
        say(f"{target}: UNHANDLED in batch {found['batch']}: {found['traceback']}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.security.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1_000_000, help="for each kind of socket (default: 1000000)")
    parser.add_argument("--seed", type=int, default=1, help="of the messages (default: 1)")
    parser.add_argument("--targets", default=",".join(TARGETS), help="kinds of socket, by commas (default: all)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_FRAMES} frames each")
    args = parser.parse_args(arguments)
    targets = [name.strip() for name in args.targets.split(",")]
    unknown = sorted(set(targets) - set(TARGETS))
    if unknown:
        parser.error(f"--targets {unknown[0]!r}: there are {', '.join(TARGETS)}")
    results = {}
    for target in targets:
        started = time.monotonic()
        results[target] = attack(target, QUICK_FRAMES if args.quick else args.frames, args.seed)
        describe(target, results[target], time.monotonic() - started)
    summary = {
        "frames": {name: result["frames"] for name, result in results.items()},
        "messages": {name: result.get("messages", 0) for name, result in results.items()},
        "accepted": {name: result.get("accepted", 0) for name, result in results.items()},
        "resealed": min(result.get("resealed", 0.0) for result in results.values()),
        "crashes": sum("crash" in result for result in results.values()),
        "unhandled": sum(len(result.get("unhandled", [])) for result in results.values()),
        "rss_growth_bytes": max(result.get("rss_growth_bytes", 0) for result in results.values()),
        "cap_bytes": CAP_BYTES,
        "cpu_s": round(sum(result.get("cpu_s", 0.0) for result in results.values()), 1),
        "seed": args.seed,
    }
    say(json.dumps(summary))
    good = not summary["crashes"] and not summary["unhandled"] and summary["rss_growth_bytes"] <= CAP_BYTES
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
