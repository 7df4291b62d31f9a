"""What an update costs over a slow link, whole and as a change."""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.random_model import SHAPES, Shape, write_weights
from scripts.bus_changes.ends import JOIN_S, MAKE_S, STEPS_BEFORE, Job
from scripts.bus_changes.namespaces import Cable

ROLES = ("publisher", "subscriber")
ENOUGH = 5
"""Versions of each kind, without the first, that a median needs."""
END_S = 10.0
MODELS = {
    "tiny": SHAPES["tiny"],
    "85M": Shape(hidden=640, layers=12, intermediate=2560, heads=10, kv_heads=5, head_dim=64, vocab=16_384, tied=True),
}

Rows = Sequence[dict[str, float]]


class LinkFailed(RuntimeError):
    """An end failed, or too little was measured."""


def measure(
    mb_s: float, *, model: str, versions: int, seed: int, lr: float, threads: int, zstd: bool
) -> dict[str, Any]:
    """The whole job.

    Raises:
        LinkFailed: an end failed; the text has the end of its log.
        NoLink: this machine cannot make the link.
    """
    if zstd and importlib.util.find_spec("zstandard") is None:
        raise LinkFailed("--zstd needs the package zstandard: pip install 'slipstream-rl[zstd]'")
    with tempfile.TemporaryDirectory(prefix="bus-changes-") as name:
        folder = Path(name)
        with Cable(mb_s, folder) as cable:
            (folder / "model").mkdir()
            write_weights(folder / "model", MODELS[model], seed)
            job = Job(
                model=str(folder / "model"),
                versions=versions,
                lr=lr,
                seed=seed,
                bucket_bytes=8 << 20,
                threads=threads,
                compressions=["none", "zstd"] if zstd else ["none"],
            )
            job.write(folder / "job.json")
            found = {role: _seen(folder, role) for role in _run(cable, folder, _limit_s(mb_s, job))}
    published, received = found["publisher"], found["subscriber"]
    passes = {name: summary(rows) for name, rows in published["passes"].items()}
    full = passes["none"].pop("full_bytes")
    result = {"link_mb_s": mb_s, "measured_mb_s": full / passes["none"]["full_phases"]["wire_s"] / 1e6, "model": model}
    result |= {"full_bytes": full, **passes["none"], "density": published["density"], "lr": lr, "step": STEPS_BEFORE}
    result |= {"subscriber_cpu_s": received["cpu_s"]["none"] / versions, "digests_equal": True}
    result |= {"threads": threads, "cores": os.cpu_count()}
    return {**result, "zstd": passes.get("zstd")}


def summary(rows: Rows) -> dict[str, Any]:
    """Medians of both kinds, without the first of each, which connects and allocates. Raises LinkFailed."""
    full = max(row["bytes"] for row in rows)
    whole, changes = [r for r in rows if r["bytes"] == full][1:], [r for r in rows if r["bytes"] < full][1:]
    if min(len(whole), len(changes)) < ENOUGH:
        raise LinkFailed(f"{len(whole)} versions whole and {len(changes)} as changes are too few; take more --versions")
    sync, delta_sync = _median(whole, "total_s"), _median(changes, "total_s")
    return {
        "full_bytes": int(full),
        "delta_bytes": int(_median(changes, "bytes")),
        "delta_ratio": full / _median(changes, "bytes"),
        "full_sync_s": sync,
        "delta_sync_s": delta_sync,
        "delta_over_full": delta_sync / sync,
        "full_cpu_s": _median(whole, "cpu_s"),
        "delta_cpu_s": _median(changes, "cpu_s"),
        "full_phases": _phases(whole),
        "delta_phases": _phases(changes),
        "measured": [len(whole), len(changes)],
    }


def _median(rows: Rows, key: str) -> float:
    return statistics.median(row.get(key, 0.0) for row in rows)


def _phases(rows: Rows) -> dict[str, float]:
    return {
        key: round(_median(rows, key), 4) for key in sorted({key for row in rows for key in row}) if key.endswith("_s")
    }


def _limit_s(mb_s: float, job: Job) -> float:
    """More than both ends can need, unless they hang: each version ten times, whole, over the link."""
    num_bytes = sum(path.stat().st_size for path in Path(job.model).glob("*.safetensors"))
    sent = job.versions * len(job.compressions) * (10 * num_bytes / (1e6 * mb_s) + 5)
    return MAKE_S + len(job.compressions) * JOIN_S + sent


def _run(cable: Cable, folder: Path, limit_s: float) -> tuple[str, ...]:
    """Both ends, until they have ended; they never outlive this process. Raises LinkFailed."""
    started: dict[str, subprocess.Popen[bytes]] = {}
    # both ends are on one machine: threads that wait must not take cores from those that work
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    environment.pop("OMP_NUM_THREADS", None)
    try:
        for end, role in enumerate(ROLES):
            command = [
                sys.executable,
                "-m",
                "scripts.bus_changes.ends",
                role,
                str(folder / "job.json"),
                str(os.getpid()),
            ]
            with (folder / f"{role}.log").open("wb") as log:
                started[role] = subprocess.Popen(cable.enter(end, command), stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + limit_s
        while any(process.poll() is None for process in started.values()):
            if any(process.returncode for process in started.values()):
                break
            if time.monotonic() > deadline:
                raise LinkFailed(f"not done within {limit_s:.0f} s; the publisher: {_tail(folder, ROLES[0])}")
            time.sleep(0.05)
        for role, process in started.items():
            if process.returncode:
                raise LinkFailed(f"the {role} ended with {process.returncode}: {_tail(folder, role)}")
    finally:
        for process in started.values():
            process.terminate()
        for process in started.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return ROLES


def _tail(folder: Path, role: str) -> str:
    return (folder / f"{role}.log").read_text(errors="replace")[-2000:]


def _seen(folder: Path, role: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{role}.json").read_text(encoding="utf-8"))
    return found
