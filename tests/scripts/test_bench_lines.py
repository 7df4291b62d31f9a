"""The last line of every benchmark, as its builders make it; the whole commands run under the marker `slow`."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.bench import bus, numbers, pipeline, replay
from scripts.bench.core import cost_of
from scripts.bench.load import Case, Counts
from scripts.bench.train import Finished

BUS_PHASES = ("apply", "epoch", "gather", "queue", "send", "total", "verify", "wire")
RAW = {"raw_s": 0.1, "raw_min_s": 0.1, "raw_max_s": 0.1, "raw_receivers": 1, "raw_repeats": 12}
PAUSED = {"name": "engine-0", "cpu_s": 0.1, "paused_s": 0.1, "pausing_s": 0.1}
TOKENS = [0, 50, 250, *range(400, 1300, 100)]
"""Of an engine at each version, which come a second apart: 200 a second without updates, then 150 or fewer."""
PAUSES = [{"version": n, "at_s": n, "tokens": count, **PAUSED} for n, count in enumerate(TOKENS)]


def updates(count: int) -> list[dict[str, Any]]:
    """Rows of updates, every second one whole."""
    seconds = dict.fromkeys([f"{phase}_s" for phase in (*BUS_PHASES, "learner_digest")], 0.1)
    return [{"version": n, "bytes": [100, 4][n % 2], "cpu_s": 0.1, **seconds} for n in range(count)]


def test_the_line_of_bus(tmp_path: Path) -> None:
    args = bus.parse(["--device", "cpu", "--quick", "--shape", "tiny"])
    found = bus.Updates(bus.settings(args, tmp_path, tmp_path), updates(6), PAUSES, 0.01, {})
    line = bus.result_of(args, found, RAW)
    assert (line["bytes"], line["delta_bytes"], line["delta_ratio"], line["delta_over_full"]) == (100, 4, 25, 1)
    assert (line["sync_over_raw"], line["wire_over_raw"]) == (1, 1)
    assert (line["decode_tokens_per_s"], line["updates_per_s"]) == (200, 1)
    assert line["decode_under_updates"] == 1 - line["decode_lost_ms_per_update"] / 1e3 == (1200 - 250) / 9 / 200
    assert line["phases"]["verify_s"] == line["engine_phases"]["paused_s"] == 0.1
    json.dumps(line)


def test_the_line_of_replay() -> None:
    counts = [dict.fromkeys(asdict(Counts()), 1000 * n) for n in range(2)]
    cost = [{f"cpu_seconds_{part}": float(n) for part in cost_of(os.getpid())} for n in range(2)]
    readings = [{"seconds": n, "written": 100 * n, **counts[n], **cost[n]} for n in range(2)]
    flow = replay.flow_of(*readings, [1 << 20] * 8)
    held = replay.held_of(128, 1 << 20, 1 << 20, 1 << 21, 0.1)
    cases = [(Case(), flow), (Case(hold=True), held)]
    line = replay.report([{"case": "x", **asdict(case), **found} for case, found in cases])
    assert line["tokens_per_cpu_second"] == 1000 and line["bytes_per_token_in"] == 1
    assert [result["hold"] for result in line["results"]] == [False, True]
    assert line["results"][1]["groups"] == 128 and line["memory_over_queued"] == held["memory_over_queued"]
    json.dumps(line)


def finished(options: argparse.Namespace, case: pipeline.Case) -> Finished:
    """A run of the pipeline whose steps took a second each, and everything else a tenth."""
    config, plan = pipeline.config_of(options, case, name="x"), pipeline.plan_of(options)
    row = {
        "response_length/mean": 24.0,
        "response_length/max": 60.0,
        "perf/total_num_tokens": 500,
        "training/update_applied": True,
        "training/lag_histogram": {"0": 5, "1": 0},
        "weight_sync/seconds": 0.1,
        "weight_sync/bytes": 1000,
        "weight_sync/digests_equal": True,
        **{f"timing_s/{name}": 0.1 for name in ("update_actor", "param_sync", "commit", "wait_batch")},
        **{f"weight_sync/{phase}_s": 0.1 for phase in (*BUS_PHASES, "update_latency")},
    }
    Path(config.run_dir).mkdir(parents=True)
    lines = [json.dumps({"step": step, "time": 0.0, **row}) for step in range(1, plan.total_steps + 1)]
    (Path(config.run_dir) / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    gauges = {("rollout-0", 3): {"pause_s": 0.1, "pausing_s": 0.1}}
    watcher = pipeline.Watcher(1.0, gauges=gauges, idle=[(3, 0.1), (6, 0.1)])
    learner = {
        "committed_at": {str(step): float(step) for step in range(plan.total_steps + 1)},
        "trained": {"seconds": [0.1, 0.1]},
        "alone": {"gather": [0.1], "digest": [0.1]},
        "memory": {},
        "quiet": True,
        "nccl": None,
    }
    return Finished(options, config, plan, watcher, learner, 1.0)


def test_the_line_of_pipeline(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--quick", "--steps", "2", "--warmup", "1", "--work", str(tmp_path)]
    options, (case,) = pipeline.parse(words)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").touch()
    pipeline.make_inputs(options, case)
    run = finished(options, case)
    line = numbers.with_raw(numbers.result_of(str(case), run), RAW)
    assert (line["t_step"], line["max_lag"], line["mean_length"], line["longest"]) == (1, 0, 24, 60)
    assert line["digests_equal"] is line["updates_applied"] is line["engines_quiet"] is True
    assert line["bus_phases"]["gather_alone_s"] == line["bus_phases"]["wire_s"] == 0.1
    assert line["sync_over_raw"] == 1 and line["settings"]["groups"] == options.groups
    json.dumps(line)
