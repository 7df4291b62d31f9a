"""`python -m scripts.bench bus --shape 1.7B --receivers 1`: what a weight update costs, phase by phase.

One publisher and several receivers, each an engine that answers requests all the time. Versions are those of real
AdamW steps; every second one is sent whole, the others as what has changed (weight_bus.delta), so both are measured in
one job and alternately. Afterwards, on the same devices, comes a bare broadcast of the same bytes, which is what the
bus is held against; on GPUs another one before, by processes of its own while the engines still answer (raw_busy). A
sync is from start_publish to the last engine whose live digests were found equal.

`--device cpu --quick` takes a model of ten million parameters, the torch engine, gloo and two receivers, in less than a
minute. Standard output gets a line for each version, and as its last line one object of JSON.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from configs.loading import ConfigError, apply_override, dump, load, validate
from configs.schema import Config
from replay.lifeline import die_with_parent, set_up_logging
from rollout_server.engines import Sampling
from rollout_server.follower import WeightFollower
from scripts.bench import model
from scripts.bench.broadcast import raw_broadcast
from scripts.bench.core import CaseFailed, Processes, Row, median_of, phases, until, write_json
from scripts.bench.server import make_engine
from scripts.chaos.report import conclude
from weight_bus import Publisher, PublishReport
from weight_bus.digest import Digester, Part
from weight_bus.transports import set_nccl_defaults

RUN = "bench-bus"
JOIN_S = 300.0
STEPS_BEFORE = 40
LOOK_S = 0.001
AROUND_S = 0.1
PROMPT = [3, 4, 5, 6]
DEFAULTS = {"shape": ("0.6B", "10M"), "receivers": (1, 2), "versions": (14, 10), "requests": (64, 4)}
DEFAULTS |= {"bucket_mib": (512.0, 4.0)}
"""Of the options that --quick changes: without it, with it."""


def settings(args: argparse.Namespace, folder: Path, path: Path) -> Config:
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
    tree: dict[str, Any] = {
        "run": {"name": "bench-bus", "dir": str(folder)},
        "model": {"path": str(path)},
        "data": {"train": "unused", "max_prompt_tokens": 16},
        "rollout": {
            "engine": "sglang" if cuda else "torch",
            "dtype": "bfloat16",
            "max_new_tokens": args.tokens,
            "max_running": args.requests,
        },
        "learner": {"compute_dtype": "bfloat16" if cuda else "float32"},
        "weight_bus": bus | ({"stage_in": args.stage_in} if cuda else {}),
        "placement": {"device": args.device, "split": f"{args.receivers}:1"},
    }
    for override in args.overrides:
        apply_override(tree, override)
    return validate(tree, "bench bus")


# ---- the publisher --------------------------------------------------------------------------------------


def to_and_fro(number: int, kept: int) -> int:
    """Which of the kept versions to send: a jump from the last one back to the first would be a long step."""
    at = number % (2 * kept - 2)
    return min(at, 2 * kept - 2 - at)


def row_of(report: PublishReport, cpu_s: float) -> dict[str, Any]:
    """Bytes and seconds of one update."""
    seconds = {f"{phase}_s": seconds for phase, seconds in report.seconds.items()}
    return {"bytes": report.num_bytes, "cpu_s": cpu_s, **seconds}


def by_kind(rows: Sequence[dict[str, Any]], enough: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Versions sent whole and as changes, without the first of each, which connects and allocates.

    Raises:
        CaseFailed: fewer than `enough` of a kind.
    """
    full = max(row["bytes"] for row in rows)
    whole, changes = [r for r in rows if r["bytes"] == full][1:], [r for r in rows if r["bytes"] < full][1:]
    if min(len(whole), len(changes)) < enough:
        raise CaseFailed(f"{len(whole)} versions whole and {len(changes)} as changes are too few; take more --versions")
    return whole, changes


def published(publisher: Publisher, number: int, version: model.Version, digester: Digester, receivers: int) -> Any:
    """Publish one version; its row. Raises CaseFailed when an engine does not have it."""
    began, cpu = time.monotonic(), time.process_time()
    digests = dict(zip(version, digester.launch().sums(), strict=True))
    digested = time.monotonic()
    report = publisher.publish(number, version.items(), digests)
    if len(report.served) != receivers:
        raise CaseFailed(f"v{number} was not served by all: {report.failed}")
    row = row_of(report, time.process_time() - cpu)
    return {"version": number, "learner_digest_s": digested - began, **row}


def publish_all(
    args: argparse.Namespace, publisher: Publisher, versions: list[model.Version], receivers: Processes
) -> list[dict[str, Any]]:
    """Wait for every engine, then publish; a row each. Raises CaseFailed."""
    digesters = [Digester(Part(tensor) for tensor in version.values()) for version in versions]
    everyone = f"{args.receivers} receivers to join"
    receivers.wait_until(everyone, lambda: len(publisher.members()) == args.receivers, JOIN_S)
    rows = []
    for number in range(args.versions):
        kept = to_and_fro(number, args.kept)
        row = published(publisher, number, versions[kept], digesters[kept], args.receivers)
        rows.append(row)
        sys.stdout.write(f"v{number}: {row['bytes']:,} bytes, {1e3 * row['total_s']:.1f} ms\n")
        time.sleep(args.between_s)
    return rows


def engine_side(pauses: Sequence[Row]) -> dict[str, Any]:
    """What updates cost the engines: gaps between tokens beyond the usual one, and what went on meanwhile."""
    gaps = [1e3 * max(0.0, row["gap_s"] - row["usual_gap_s"]) for row in pauses]
    names = ("paused_s", "pausing_s", "apply_wait_s", "apply_load_s", "apply_digest_s")
    return {
        "pause_ms_p50": statistics.median(gaps) if gaps else None,
        "pause_ms_max": max(gaps, default=None),
        "engine_phases": {key: median_of(pauses, key) for key in names} if pauses else {},
    }


def result_of(
    args: argparse.Namespace, rows: list[dict[str, Any]], pauses: list[dict[str, Any]], raw: Row, density: float
) -> dict[str, Any]:
    """What both ways cost, beside the raw broadcast. Raises CaseFailed when too little was measured."""
    whole, changes = by_kind(rows, 1)
    full, smaller = whole[0]["bytes"], statistics.median(row["bytes"] for row in changes)
    engines = [
        engine_side([p for p in pauses if p["version"] in {r["version"] for r in kind}]) for kind in (whole, changes)
    ]
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        **{key: getattr(args, key) for key in ("shape", "device", "transport", "receivers")},
        "bytes": full,
        "sync_s": median_of(whole, "total_s"),
        "wire_s": median_of(whole, "wire_s"),
        "phases": phases(whole),
        "delta_bytes": smaller,
        "delta_ratio": full / smaller,
        "delta_sync_s": median_of(changes, "total_s"),
        "delta_over_full": median_of(changes, "total_s") / median_of(whole, "total_s"),
        "delta_cpu_s": median_of(changes, "cpu_s"),
        "delta_phases": phases(changes),
        "compression": args.compression,
        **engines[0],
        **{f"delta_{key}": value for key, value in engines[1].items()},
        "digests_equal": True,
        "density": density,
        "lr": args.lr,
        "step": STEPS_BEFORE,
        **raw,
        "sync_over_raw": median_of(whole, "total_s") / raw["raw_s"],
        "wire_over_raw": median_of(whole, "wire_s") / raw["raw_s"],
        "receivers_cpu_s": usage.ru_utime + usage.ru_stime,
        "torch": torch.__version__,
    }


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole job. Raises CaseFailed, ConfigError."""
    path = args.work / f"{args.shape}-seed{args.seed}" if args.work else folder / "model"
    model.make(args.shape, path, args.seed)
    config = settings(args, folder, path)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", 0)
        set_nccl_defaults(config.weight_bus)
        torch.cuda.set_device(device)
    made = model.versions(path, before=STEPS_BEFORE, count=args.kept, lr=args.lr, device=device, seed=args.seed)
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    busy: dict[str, Any] = {}
    with Processes(folder) as receivers:
        with Publisher(config.weight_bus, host="127.0.0.1", run_id=RUN, incarnation=1) as publisher:
            for number in range(args.receivers):
                start_receiver(args, receivers, publisher.address, number)
            rows = publish_all(args, publisher, made, receivers)
            full = max(row["bytes"] for row in rows)
            if args.device == "cuda" and args.transport == "collective":
                busy = raw_broadcast(config, full)
        until(receivers.ended, 20)  # by themselves, with the publisher's goodbye
    pauses = [json.loads(line) for line in (folder / "pauses.jsonl").read_text().splitlines()]
    result = result_of(args, rows, pauses, raw_broadcast(config, full), model.density(made[0], made[1]))
    if busy:
        result |= {"raw_busy_s": busy["raw_s"], "wire_over_raw_busy": result["wire_s"] / busy["raw_s"]}
    return result


def start_receiver(args: argparse.Namespace, receivers: Processes, address: str, number: int) -> None:
    """One process, on a GPU of its own after the publisher's."""
    folder = receivers.folder
    job = {"address": address, "name": f"engine-{number}", "requests": args.requests, "parent": os.getpid()}
    words = [sys.executable, "-m", "scripts.bench.bus", str(folder), json.dumps(job)]
    devices = {"CUDA_VISIBLE_DEVICES": str(number + 1)} if args.device == "cuda" else {}
    receivers.start(f"engine-{number}", words, OMP_NUM_THREADS="1", **devices)


# ---- a receiver -----------------------------------------------------------------------------------------


class Receiver:
    """An engine that answers without end, stamps its tokens, and writes a line of JSON for each version gone live.

    The pause is the longest gap between tokens around that moment.
    """

    def __init__(self, config: Config, name: str, out: Path, requests: int) -> None:
        self.config, self.name, self.out, self.requests = config, name, out, requests
        self.engine = make_engine(config)
        self.stamps: list[float] = []
        self.first_live = asyncio.Event()
        self.follower = WeightFollower(config, self.engine, name, on_live=self._live, on_quarantine=self._dark)

    async def run(self, address: str) -> None:
        """Until the publisher says goodbye."""
        self.follower.follow(address, RUN)
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(self._answer(number)) for number in range(self.requests)]
            work.append(tasks.create_task(self._look()))
            thread = self.follower._thread
            assert thread is not None
            await asyncio.to_thread(thread.join)  # it ends with the publisher's goodbye
            for task in work:
                task.cancel()
        await self.engine.close()

    async def _answer(self, number: int) -> None:
        sampling = Sampling(max_new_tokens=self.config.rollout.max_new_tokens, stop_token_ids=())
        await self.first_live.wait()
        for again in range(1_000_000):
            await self.engine.generate(PROMPT, sampling, 1, request_id=f"{number}/{again}")

    async def _look(self) -> None:
        """Stamp each growth of the running answers."""
        before: dict[str, int] = {}
        while True:
            now = dict(self.engine.running_tokens())
            if any(count > before.get(name, 0) for name, count in now.items()):
                self.stamps.append(time.monotonic())
            before = now
            await asyncio.sleep(LOOK_S)

    async def _live(self, version: int, _: int) -> None:
        self.first_live.set()
        asyncio.get_running_loop().create_task(self._note(version, time.monotonic()))

    async def _note(self, version: int, live_at: float) -> None:
        pause, pausing = self.follower.gauges["pause_s"], self.follower.gauges["pausing_s"]
        await asyncio.sleep(AROUND_S)
        detail = (await self.engine.health()).detail
        gaps = [(b - a, a, b) for a, b in zip(self.stamps, self.stamps[1:], strict=False)]
        around = [gap for gap, a, b in gaps if b > live_at - pause and a < live_at + AROUND_S]
        row = {
            "name": self.name,
            "version": version,
            "paused_s": pause,
            "pausing_s": pausing,
            **{name: seconds for name, seconds in detail.items() if name.startswith("apply_")},
            "gap_s": max(around, default=0.0),
            "usual_gap_s": statistics.median(gap for gap, _, _ in gaps) if gaps else 0.0,
        }
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    async def _dark(self, reason: str) -> None:
        raise RuntimeError(reason)


def main() -> int:
    """Entry point of one receiver: `python -m scripts.bench.bus FOLDER JOB`."""
    folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    die_with_parent(job["parent"])
    config = load(folder / "config.yaml")
    set_up_logging(job["name"], None)

    async def serve() -> None:  # the engine's loop is this one
        await Receiver(config, job["name"], folder / "pauses.jsonl", job["requests"]).run(job["address"])

    asyncio.run(serve())
    return 0


# ---- the command ----------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench bus", description=__doc__)
    parser.add_argument("--shape", choices=sorted(model.SHAPES), help="default: 0.6B; with --quick 10M")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small, in less than a minute")
    parser.add_argument("--receivers", type=int, help="default: 1; with --quick 2")
    parser.add_argument("--transport", choices=["collective", "disk"], default="collective")
    parser.add_argument("--compression", choices=["none", "zstd"], default="none")
    parser.add_argument(
        "--stage-in", choices=["server", "engine"], default="engine", help="weight_bus.stage_in, on GPUs"
    )
    parser.add_argument("--versions", type=int, help="to publish; default: 14, with --quick 10")
    parser.add_argument("--kept", type=int, default=3, help="consecutive versions in memory, sent to and fro")
    parser.add_argument("--lr", type=float, default=1e-6, help="of the AdamW steps")
    parser.add_argument("--requests", type=int, help="that each engine answers meanwhile; default: 64, with --quick 4")
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--bucket-mib", type=float, help="default: 512; with --quick 4")
    parser.add_argument("--between-s", type=float, default=0.3, help="pause between versions")
    parser.add_argument("--work", type=Path, help="folder for models; default: a temporary one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="a key of the configuration")
    parser.add_argument("--out", type=Path, help="also write the result there")
    args = parser.parse_args(argv)
    for name, values in DEFAULTS.items():
        setattr(args, name, getattr(args, name) or values[args.quick])
    return args


def command(argv: Sequence[str]) -> int:
    """Command line."""
    args = parse(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-bus-") as folder:
            result = measure(args, Path(folder))
    except (CaseFailed, ConfigError) as error:
        sys.stderr.write(f"bench bus: {error}\n{getattr(error, 'logs', '')}\n")
        return 1
    if args.out is not None:
        write_json(args.out, result)
    return conclude(result, (), in_order=True)


if __name__ == "__main__":
    sys.exit(main())
