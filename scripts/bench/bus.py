"""`python -m scripts.bench bus --shape 1.7B --receivers 1`: what a weight update costs, phase by phase.

One publisher and several receivers, each an engine that answers requests all the time. Versions are those of real
AdamW steps; every second one is sent whole, the others as what has changed (weight_bus.delta), so both are measured in
one job and alternately. Afterwards, on the same devices, comes a bare broadcast of the same bytes, which is what the
bus is held against; on GPUs another one before, by processes of its own while the engines still answer (raw_busy). A
sync is from start_publish to the last engine whose live digests were found equal. Between the first two versions and
the others the engines decode undisturbed for --quiet-s, which says what share of their throughput updates cost.

`--device cpu --quick` takes a model of ten million parameters, the torch engine, gloo and two receivers, in less than a
minute. Standard output gets a line for each version, and as its last line one object of JSON.
"""

import argparse
import asyncio
import itertools
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from configs import loading
from configs.schema import Config
from examples.random_qwen3 import SHAPES, make
from rollout_server.engines import Sampling
from rollout_server.follower import WeightFollower
from scripts.bench import core
from scripts.bench.broadcast import raw_broadcast
from scripts.bench.core import CaseFailed, Processes, Row
from scripts.bench.server import make_engine
from scripts.chaos.report import conclude
from slipstream.launch import children
from slipstream.runtime.lifeline import die_with_parent, set_up_logging
from weight_bus import Publisher
from weight_bus.digest import Digester, TensorSlice
from weight_bus.transports import set_nccl_defaults

Version = dict[str, torch.Tensor]
RUN = "bench-bus"
JOIN_S, END_S = 300.0, 20.0
STEPS_BEFORE = 40
BETWEEN_S = 0.3  # between two versions
QUIET_AFTER = 1  # version, the second one: both ways have connected and allocated
LENGTHS = 8  # of answers, different ones, so that no two requests end together for long
AROUND_S = 0.1  # so long after an update the next token of every request has come
PROMPT = [3, 4, 5, 6]
SIZES = {
    "shape": ("0.6B", "10M", "of the model"),
    "receivers": (1, 2, "engines"),
    "tensor_parallel": (1, 1, "devices of an engine"),
    "versions": (14, 10, "to publish"),
    "requests": (64, 4, "that each engine answers meanwhile"),
    "bucket_mib": (512.0, 4.0, "size of one broadcast"),
    "tokens": (512, 32, "of the longest answer"),
    "quiet_s": (15.0, 2.0, "in which the engines decode without an update"),
}


def settings(args: argparse.Namespace, folder: Path, path: Path) -> Config:
    """The configuration of the job. Raises ConfigError."""
    rollout = {"dtype": "bfloat16", "max_new_tokens": args.tokens, "max_running": max(1, args.requests)}
    bus: dict[str, Any] = {"bucket_bytes": int(args.bucket_mib * 2**20), "delta": True, "full_every": 2}
    bus |= {"deadline_s": 120.0, "collective_timeout_s": 30.0}
    tree: dict[str, Any] = {
        "run": {"name": RUN, "dir": str(folder)},
        "model": {"path": str(path)},
        "data": {"train": "unused", "max_prompt_tokens": 16},
        "reward": {"function": "exact"},
        "rollout": rollout,
        "weight_bus": bus,
        "placement": {
            "device": args.device,
            "split": f"{args.receivers * args.tensor_parallel}:1",
            "tensor_parallel": args.tensor_parallel,
        },
    }
    return loading.parse(json.dumps(tree), "bench bus", args.overrides)


def make_versions(
    folder: Path, *, before: int, count: int, lr: float, device: torch.device, seed: int
) -> list[Version]:
    """`count` consecutive versions in bf16 on the device, the first of them after `before` AdamW steps.

    Adam works element by element, so each tensor takes all its steps alone, with gradients of noise. The share of
    elements that change in a step depends on the learning rate and on how old Adam's moments are, not on what was
    trained (docs/benchmarks/bus.md).
    """
    from rollout_server.engines.torch.weights import read_folder  # imports transformers, which SGLang must precede

    made: list[Version] = [{} for _ in range(count)]
    generator = torch.Generator(device).manual_seed(seed)
    for name, tensor in read_folder(folder, tied=False, dtype=torch.float32):
        weight = torch.nn.Parameter(tensor.to(device))
        optimizer = torch.optim.AdamW([weight], lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        weight.grad = torch.empty_like(weight)
        for step in range(1, before + count):
            weight.grad.normal_(generator=generator)
            optimizer.step()
            if step >= before:
                made[step - before][name] = weight.detach().to(torch.bfloat16)
    return made


def density(old: Version, new: Version) -> float:
    """Share of elements whose bits differ."""
    changed = sum(int((old[name].view(torch.int16) != new[name].view(torch.int16)).sum()) for name in new)
    return changed / sum(tensor.numel() for tensor in new.values())


def publish_all(publisher: Publisher, made: list[Version], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Publish one version after the other; bytes and seconds of each. Raises CaseFailed when a receiver lacks one."""
    digesters = [Digester(TensorSlice(tensor) for tensor in version.values()) for version in made]
    rows = []
    # to and fro: a jump from the last one back to the first would be a long step
    order = [*range(len(made)), *range(len(made) - 2, 0, -1)]
    for number in range(args.versions):
        kept = order[number % len(order)]
        began, cpu = time.monotonic(), time.process_time()
        digests = dict(zip(made[kept], digesters[kept].launch().sums(), strict=True))
        digested = time.monotonic() - began
        report = publisher.publish(number, made[kept].items(), digests)
        if len(report.served) != args.receivers:
            raise CaseFailed(f"v{number} was not served by all: {report.failed}")
        row = {"version": number, "bytes": report.num_bytes, "cpu_s": time.process_time() - cpu}
        row |= {f"{phase}_s": seconds for phase, seconds in report.seconds.items()}
        rows.append(row | {"learner_digest_s": digested})
        print(f"v{number}: {row['bytes']:,} bytes, {1e3 * row['total_s']:.1f} ms", flush=True)
        time.sleep(args.quiet_s if number == QUIET_AFTER else BETWEEN_S)
    return rows


def by_kind(rows: Sequence[Row], enough: int) -> tuple[list[Row], list[Row]]:
    """Versions sent whole and as changes, without the first of each, which connects and allocates.

    Raises CaseFailed when fewer than `enough` of a kind are left.
    """
    full = max(row["bytes"] for row in rows)
    whole, changes = [r for r in rows if r["bytes"] == full][1:], [r for r in rows if r["bytes"] < full][1:]
    if min(len(whole), len(changes)) < enough:
        raise CaseFailed(f"{len(whole)} versions whole and {len(changes)} as changes are too few; take more --versions")
    return whole, changes


def summary(whole: Sequence[Row], changes: Sequence[Row]) -> dict[str, Any]:
    """Medians of versions sent whole (`full_`) and as changes (`delta_`)."""
    found: dict[str, Any] = {}
    for kind, its in (("full", whole), ("delta", changes)):
        phases = core.medians(its)
        found |= {f"{kind}_bytes": core.median(row["bytes"] for row in its), f"{kind}_sync_s": phases["total_s"]}
        found |= {f"{kind}_cpu_s": phases["cpu_s"], f"{kind}_phases": phases}
    found["delta_ratio"] = found["full_bytes"] / found["delta_bytes"]
    found["delta_over_full"] = found["delta_sync_s"] / found["full_sync_s"]
    return found | {"measured": [len(whole), len(changes)]}


def engine_side(pauses: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any]:
    """What these versions cost the engines: how long decoding stood still, and what went on meanwhile."""
    versions = {row["version"] for row in rows}
    seen = [pause for pause in pauses if pause["version"] in versions]
    gaps = [pause.get("gap_ms", 1e3 * pause["paused_s"]) for pause in seen]
    names = ("paused_s", "pausing_s", "apply_wait_s", "apply_load_s", "apply_digest_s")
    return {
        "pause_ms_p50": core.median(gaps),
        "pause_ms_p99": core.quantile(gaps, 0.99),
        "pause_ms_max": max(gaps, default=None),
        "engine_phases": {key: core.median(pause.get(key, 0.0) for pause in seen) for key in names} if seen else {},
    }


def throughput(pauses: Sequence[Row]) -> dict[str, Any]:
    """Tokens a second of the first engine without updates and under them, and what an update takes of decoding."""
    rows = sorted((row for row in pauses if row["name"] == "engine-0"), key=lambda row: row["version"])
    before, after, last = (
        next(r for r in rows if r["version"] == v) for v in (QUIET_AFTER, QUIET_AFTER + 1, rows[-1]["version"])
    )
    quiet, busy = ((b["tokens"] - a["tokens"]) / (b["at_s"] - a["at_s"]) for a, b in ((before, after), (after, last)))
    if quiet == 0:
        raise CaseFailed("no answer ended within --quiet-s; take fewer --tokens")
    updates, seconds = last["version"] - after["version"], last["at_s"] - after["at_s"]
    return {
        "decode_tokens_per_s": quiet,
        "decode_under_updates": busy / quiet,
        "decode_lost_ms_per_update": 1e3 * (1 - busy / quiet) * seconds / updates,
        "updates_per_s": updates / seconds,
    }


class Updates(NamedTuple):
    """What a publisher and its receivers have measured."""

    config: Config
    rows: list[dict[str, Any]]  # of the publisher, one a version
    pauses: list[dict[str, Any]]  # of the receivers, one a version and engine
    density: float  # share of elements that a version changes
    busy: dict[str, Any]  # a raw broadcast while the engines answer, on GPUs


def result_of(args: argparse.Namespace, found: Updates, raw: Row) -> dict[str, Any]:
    """What both ways cost, beside the raw broadcast. Raises CaseFailed when too little was measured."""
    whole, changes = by_kind(found.rows, 1)
    medians, bus = summary(whole, changes), found.config.weight_bus
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    phases = medians["full_phases"]
    result = {
        **{key: getattr(args, key) for key in ("shape", "device", "receivers", "tensor_parallel", "lr")},
        "transport": bus.transport,
        "bytes": medians["full_bytes"],
        "sync_s": phases["total_s"],
        "wire_s": phases["wire_s"],
        "phases": phases,
        **{key: value for key, value in medians.items() if key.startswith("delta_")},
        "compression": bus.compression,
        **engine_side(found.pauses, whole),
        **{f"delta_{key}": value for key, value in engine_side(found.pauses, changes).items()},
        **throughput(found.pauses),
        "digests_equal": True,
        "density": found.density,
        "step": STEPS_BEFORE,
        **raw,
        "sync_over_raw": phases["total_s"] / raw["raw_s"],
        "wire_over_raw": phases["wire_s"] / raw["raw_s"],
        "receivers_cpu_s": usage.ru_utime + usage.ru_stime,
        "torch": torch.__version__,
    }
    if "error" in found.busy:
        result["raw_busy_error"] = found.busy["error"]
    elif found.busy:
        result |= {"raw_busy_s": found.busy["raw_s"], "wire_over_raw_busy": phases["wire_s"] / found.busy["raw_s"]}
    return result


def updates(args: argparse.Namespace, folder: Path) -> Updates:
    """Publish all versions to receivers. Raises CaseFailed, ConfigError."""
    path = args.work / f"{args.shape}-seed{args.seed}" if args.work else folder / "model"
    make(args.shape, path, args.seed)
    config = settings(args, folder, path)
    cuda = args.device == "cuda"
    device = torch.device("cuda:0" if cuda else "cpu")
    if cuda:
        set_nccl_defaults(config.weight_bus)
        torch.cuda.set_device(device)
    made = make_versions(path, before=STEPS_BEFORE, count=args.kept, lr=args.lr, device=device, seed=args.seed)
    (folder / "config.yaml").write_text(loading.dump(config), encoding="utf-8")
    busy: dict[str, Any] = {}
    with Processes(folder, JOIN_S) as processes:
        identity: dict[str, Any] = {"run_id": RUN, "incarnation": 1, "insecure": config.network.insecure}
        with Publisher(config.weight_bus, host="127.0.0.1", **identity) as publisher:
            for number in range(args.receivers):
                name = f"engine-{number}"
                job = json.dumps({"name": name, "address": publisher.address, "requests": args.requests})
                words = [sys.executable, "-m", "scripts.bench.bus", str(folder), job, str(os.getpid())]
                # each on GPUs of its own, after the publisher's
                first = 1 + number * args.tensor_parallel
                own = ",".join(map(str, range(first, first + args.tensor_parallel)))
                devices = {"CUDA_VISIBLE_DEVICES": own} if cuda else {}
                processes.start(name, words, OMP_NUM_THREADS="1", **devices)
            what = f"{args.receivers} receivers to join"
            processes.wait(what, lambda: len(publisher.members()) == args.receivers)
            rows = publish_all(publisher, made, args)
            if cuda and config.weight_bus.transport == "collective":
                with core.noted(busy, "error"):  # where the engine leaves no memory for it, the rest stays
                    busy |= raw_broadcast(config, max(row["bytes"] for row in rows))
        # they end with the publisher's goodbye
        children.wait_or_kill([child.process for child in processes.children], END_S)
    pauses = [json.loads(line) for line in (folder / "pauses.jsonl").read_text().splitlines()]
    return Updates(config, rows, pauses, density(made[0], made[1]), busy)


async def receive(folder: Path, *, name: str, address: str, requests: int) -> None:
    """An engine that answers until the publisher says goodbye, and writes a line of JSON for each version gone live."""
    config = loading.load(folder / "config.yaml")
    engine, first_live, gaps_seen, tokens = make_engine(config), asyncio.Event(), 0.0, 0

    async def answer(number: int) -> None:
        nonlocal tokens
        await first_live.wait()
        for again in itertools.count(number):
            length = max(1, config.rollout.max_new_tokens * (LENGTHS - again % LENGTHS) // LENGTHS)
            sampling = Sampling(max_new_tokens=length, stop_token_ids=())
            await engine.generate(PROMPT, sampling, 1, request_id=f"{number}/{again}")
            tokens += length

    async def note(version: int) -> None:
        nonlocal gaps_seen
        row = {"name": name, "version": version, "cpu_s": time.process_time(), "at_s": time.monotonic()}
        row["tokens"] = tokens
        row |= {"paused_s": follower.gauges["pause_s"], "pausing_s": follower.gauges["pausing_s"]}
        await asyncio.sleep(AROUND_S)
        detail = (await engine.health()).detail
        row |= {key: seconds for key, seconds in detail.items() if key.startswith("apply_")}
        if detail.get("pause_samples", 0.0) > gaps_seen:  # the probe had a token on either side of the update
            gaps_seen, row["gap_ms"] = detail["pause_samples"], detail["pause_ms_last"]
        with (folder / "pauses.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    async def live(version: int, _: int) -> None:
        first_live.set()
        tasks.create_task(note(version))

    async def dark(reason: str) -> None:
        raise RuntimeError(reason)

    follower = WeightFollower(config, engine, name, on_live=live, on_quarantine=dark)
    async with asyncio.TaskGroup() as tasks:
        follower.follow(address, RUN)
        work = [tasks.create_task(answer(number)) for number in range(requests)]
        assert follower._thread is not None
        await asyncio.to_thread(follower._thread.join)  # it ends with the publisher's goodbye
        for task in work:
            task.cancel()
    await engine.close()
    if follower.failure is not None:
        raise follower.failure


def main() -> None:
    """One receiver: `python -m scripts.bench.bus FOLDER JOB PARENT`."""
    folder, job, parent = sys.argv[1:]
    die_with_parent(int(parent))
    settings = json.loads(job)
    set_up_logging(settings["name"], None)
    asyncio.run(receive(Path(folder), **settings))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = core.make_parser("bus", __doc__, SIZES, argv)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--kept", type=int, default=3, help="consecutive versions in memory, sent to and fro")
    parser.add_argument("--lr", type=float, default=1e-6, help="of the AdamW steps")
    parser.add_argument("--work", type=Path, help="folder for models; default: a temporary one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", dest="overrides", action="append", default=[], help="a key of the configuration")
    parser.add_argument("--out", type=Path, help="also write the result there")
    args = parser.parse_args(argv)
    if args.shape not in SHAPES:
        parser.error(f"--shape {args.shape!r}: take one of {', '.join(SHAPES)}")
    return args


def command(argv: Sequence[str]) -> int:
    """1 when there is no result."""
    args = parse(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-bus-") as folder:
            found = updates(args, Path(folder))
            raw = raw_broadcast(found.config, max(row["bytes"] for row in found.rows))
            result = result_of(args, found, raw)
    except (CaseFailed, loading.ConfigError) as error:
        core.say(str(error))
        return 1
    if args.out is not None:
        core.write_json(args.out, result)
    return conclude(result, (), in_order=True)


if __name__ == "__main__":
    main()
