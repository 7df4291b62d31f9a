"""`python -m scripts.bench_bus --shape 1.7B --receivers 1`: what a weight update costs, phase by phase.

One publisher and several receivers, each an engine that answers requests all the time. Versions are those of real
AdamW steps; every second one is sent whole, the others as what has changed (weight_bus.delta), so both are measured in
one job and alternately. Afterwards, on the same devices, comes a bare broadcast of the same bytes, which is what the
bus is held against; on GPUs another one before, by processes of its own while the engines still answer (raw_busy). A
sync is from start_publish to the last engine whose live digests were found equal.

`--device cpu --quick` takes a model of ten million parameters, the torch engine, gloo and two receivers, in less than a
minute. Standard output gets a line for each version, and as its last line one object of JSON.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from configs.loading import ConfigError, apply_override, validate
from configs.schema import Config
from scripts.bench.random_model import SHAPES, make
from scripts.bench.run import CaseFailed, raw_broadcast
from scripts.bench_bus_parts import steps
from scripts.bench_bus_parts.receiver import RUN
from weight_bus import Publisher
from weight_bus.digest import Digester, Part
from weight_bus.jobs import PublishReport
from weight_bus.transports import set_nccl_defaults

JOIN_S = 300.0
STEPS_BEFORE = 40
QUICK_SHAPE = "10M"


def settings(args: argparse.Namespace, folder: Path, model: Path) -> Config:
    """The configuration of the job. Raises ConfigError."""
    cuda = args.device == "cuda"
    bus = {
        "transport": args.transport,
        "backend": "nccl" if cuda and args.transport == "collective" else "gloo",
        "folder": str(folder / "weights") if args.transport == "disk" else None,
        "bucket_bytes": int(args.bucket_mib * 2**20),
        "delta": True,
        "full_every": 2,
        "compression": args.compression,
        "deadline_s": 120.0,
        "collective_timeout_s": 30.0,
    }
    rollout: dict[str, Any] = {
        "engine": "sglang" if cuda else "torch",
        "dtype": "bfloat16",
        "max_new_tokens": args.tokens,
        "max_running": args.requests,
    }
    if cuda:
        bus["stage_in"] = args.stage_in
    tree: dict[str, Any] = {
        "run": {"name": "bench-bus", "dir": str(folder)},
        "model": {"path": str(model)},
        "data": {"train": "unused", "max_prompt_tokens": 16},
        "rollout": rollout,
        "learner": {"compute_dtype": "bfloat16" if cuda else "float32"},
        "weight_bus": bus,
        "placement": {"device": args.device, "split": f"{args.receivers}:1"},
    }
    for override in args.overrides:
        apply_override(tree, override)
    return validate(tree, "bench_bus")


def start_receivers(
    args: argparse.Namespace, config: Config, folder: Path, address: str
) -> list[subprocess.Popen[bytes]]:
    """One process each, on a GPU of its own after the publisher's."""
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    started = []
    for number in range(args.receivers):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if args.device == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = str(number + 1)
        command = [sys.executable, "-m", "scripts.bench_bus_parts.receiver", "--config", str(path)]
        command += ["--address", address, "--server", f"engine-{number}", "--out", str(folder / "pauses.jsonl")]
        command += ["--requests", str(args.requests), "--parent", str(os.getpid())]
        with (folder / f"engine-{number}.log").open("wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return started


def wait_for_all(publisher: Publisher, receivers: Sequence["subprocess.Popen[bytes]"], folder: Path) -> None:
    """Until every receiver has joined. Raises CaseFailed."""
    deadline = time.monotonic() + JOIN_S
    while len(publisher.members()) < len(receivers):
        gone = [number for number, process in enumerate(receivers) if process.poll() is not None]
        if gone or time.monotonic() > deadline:
            which = gone[0] if gone else 0
            text = (folder / f"engine-{which}.log").read_text(errors="replace")
            raise CaseFailed(f"engine-{which} did not join: {text[-2000:]}")
        time.sleep(0.05)


def published(
    publisher: Publisher, number: int, version: steps.Version, digester: Digester, receivers: int
) -> dict[str, Any]:
    """Publish one version and say how long what took. Raises CaseFailed when an engine does not have it."""
    began, cpu = time.monotonic(), time.process_time()
    digests = dict(zip(version, digester.launch().sums(), strict=True))
    digested = time.monotonic()
    report: PublishReport = publisher.publish(number, version.items(), digests)
    if len(report.served) != receivers:
        raise CaseFailed(f"v{number} was not served by all: {report.failed}")
    return {
        "version": number,
        "bytes": report.num_bytes,
        "cpu_s": time.process_time() - cpu,
        "learner_digest_s": digested - began,
        **{f"{phase}_s": seconds for phase, seconds in report.seconds.items()},
    }


def median(rows: Sequence[dict[str, Any]], key: str) -> float:
    """Over versions."""
    return statistics.median(row.get(key, 0.0) for row in rows)


def phases(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians of all phases."""
    names = sorted({key for row in rows for key in row if key.endswith("_s")})
    return {name: median(rows, name) for name in names}


def engine_side(pauses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What updates cost the engines: gaps between tokens beyond the usual one, and what went on meanwhile."""
    gaps = [1e3 * max(0.0, row["gap_s"] - row["usual_gap_s"]) for row in pauses]
    phases = ("paused_s", "pausing_s", "apply_wait_s", "apply_load_s", "apply_digest_s")
    return {
        "pause_ms_p50": statistics.median(gaps) if gaps else None,
        "pause_ms_max": max(gaps, default=None),
        "engine_phases": {key: median(pauses, key) for key in phases} if pauses else {},
    }


def summary(
    args: argparse.Namespace, rows: list[dict[str, Any]], pauses: list[dict[str, Any]], full: int
) -> dict[str, Any]:
    """What both ways cost, without the first of each, which connects and allocates."""
    whole, changes = [r for r in rows if r["bytes"] == full][1:], [r for r in rows if r["bytes"] != full][1:]
    if not whole or not changes:
        raise CaseFailed(
            f"too few versions of a kind: {len(whole)} whole, {len(changes)} changes; take more --versions"
        )
    by_kind = [[p for p in pauses if p["version"] in {row["version"] for row in kind}] for kind in (whole, changes)]
    return {
        "shape": args.shape,
        "device": args.device,
        "transport": args.transport,
        "receivers": args.receivers,
        "bytes": full,
        "sync_s": median(whole, "total_s"),
        "wire_s": median(whole, "wire_s"),
        "phases": phases(whole),
        "delta_bytes": statistics.median(row["bytes"] for row in changes),
        "delta_ratio": full / statistics.median(row["bytes"] for row in changes),
        "delta_sync_s": median(changes, "total_s"),
        "delta_over_full": median(changes, "total_s") / median(whole, "total_s"),
        "delta_cpu_s": median(changes, "cpu_s"),
        "delta_phases": phases(changes),
        "compression": args.compression,
        **engine_side(by_kind[0]),
        **{f"delta_{key}": value for key, value in engine_side(by_kind[1]).items()},
        "digests_equal": True,
    }


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole job. Raises CaseFailed, ConfigError."""
    model = args.work / f"{args.shape}-seed{args.seed}" if args.work else folder / "model"
    make(args.shape, model, args.seed)
    config = settings(args, folder, model)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        set_nccl_defaults(config.weight_bus)
        torch.cuda.set_device(device)
    made = steps.versions(model, before=STEPS_BEFORE, count=args.kept, lr=args.lr, device=device, seed=args.seed)
    digesters = [Digester(Part(tensor) for tensor in version.values()) for version in made]
    rows: list[dict[str, Any]] = []
    busy: dict[str, Any] = {}
    with Publisher(config.weight_bus, host="127.0.0.1", run_id=RUN, incarnation=1) as publisher:
        receivers = start_receivers(args, config, folder, publisher.address)
        try:
            wait_for_all(publisher, receivers, folder)
            for number in range(args.versions):
                # to and fro: the step from the last kept version back to the first would be a long one
                at = number % (2 * args.kept - 2)
                kept = min(at, 2 * args.kept - 2 - at)
                row = published(publisher, number, made[kept], digesters[kept], args.receivers)
                rows.append(row)
                say(f"v{number}: {row['bytes']:,} bytes, {1e3 * row['total_s']:.1f} ms")
                time.sleep(args.between_s)
            full = max(row["bytes"] for row in rows)
            if args.device == "cuda" and args.transport == "collective":
                busy = raw_broadcast(config, full)
        finally:
            publisher.close()
            for process in receivers:
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    pauses = [json.loads(line) for line in (folder / "pauses.jsonl").read_text().splitlines()]
    result = summary(args, rows, pauses, full)
    result |= {"density": steps.density(made[0], made[1]), "lr": args.lr, "step": STEPS_BEFORE}
    result |= raw_broadcast(config, full)
    result["sync_over_raw"] = result["sync_s"] / result["raw_s"]
    result["wire_over_raw"] = result["wire_s"] / result["raw_s"]
    if busy:
        result |= {"raw_busy_s": busy["raw_s"], "wire_over_raw_busy": result["wire_s"] / busy["raw_s"]}
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {**result, "receivers_cpu_s": usage.ru_utime + usage.ru_stime, "torch": torch.__version__}


def say(text: str) -> None:
    """A line for people."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_bus", description=__doc__)
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default=None, help=f"default: 0.6B; with --quick {QUICK_SHAPE}"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small, in less than a minute")
    parser.add_argument("--receivers", type=int, default=None, help="default: 1; with --quick 2")
    parser.add_argument("--transport", choices=["collective", "disk"], default="collective")
    parser.add_argument("--compression", choices=["none", "zstd"], default="none")
    parser.add_argument(
        "--stage-in", choices=["server", "engine"], default="engine", help="weight_bus.stage_in, on GPUs"
    )
    parser.add_argument("--versions", type=int, default=None, help="to publish; default: 14, with --quick 10")
    parser.add_argument("--kept", type=int, default=3, help="consecutive versions in memory, sent to and fro")
    parser.add_argument("--lr", type=float, default=1e-6, help="of the AdamW steps")
    parser.add_argument("--requests", type=int, default=None, help="that each engine answers meanwhile")
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--bucket-mib", type=float, default=None, help="default: 512; with --quick 4")
    parser.add_argument("--between-s", type=float, default=0.3, help="pause between versions")
    parser.add_argument("--work", type=Path, default=None, help="folder for models; default: a temporary one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="a key of the configuration")
    parser.add_argument("--out", type=Path, default=None, help="also write the result there")
    args = parser.parse_args()
    args.shape = args.shape or (QUICK_SHAPE if args.quick else "0.6B")
    args.receivers = args.receivers or (2 if args.quick else 1)
    args.versions = args.versions or (10 if args.quick else 14)
    args.requests = args.requests or (4 if args.quick else 64)
    args.bucket_mib = args.bucket_mib or (4.0 if args.quick else 512.0)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-bus-") as folder:
            result = measure(args, Path(folder))
    except (CaseFailed, ConfigError) as error:
        sys.stderr.write(f"bench_bus: {error}\n")
        return 1
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
