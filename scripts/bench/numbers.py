"""From a finished pipeline run to its numbers."""

import os
import platform
import statistics
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from learner.record.metrics import FILE, read_rows, tokens_by_lag
from scripts.bench.core import Row, median, medians, quantile, versions
from scripts.bench.train import Finished, Phase

SYNC = "weight_sync/"
SETTINGS = """
    prompt=data.max_prompt_tokens length_cap=rollout.max_new_tokens lag=replay.async_lag seed=run.seed lr=learner.lr
    groups=rollout.groups_per_step group_size=rollout.group_size engine=rollout.engine max_running=rollout.max_running
    dtype=rollout.dtype backend=weight_bus.backend bucket_bytes=weight_bus.bucket_bytes
    microbatch_tokens=learner.max_tokens_per_microbatch share_gpus=placement.share_gpus
"""
WARM_UPDATES = 2  # a server's first weight updates allocate and connect; their pauses are not counted


def result_of(case: str, run: Finished) -> dict[str, Any]:
    """All numbers of a run but those that are held against the raw broadcast."""
    rows = {row["step"]: row for row in read_rows(Path(run.config.run_dir) / FILE) if "step" in row}
    idle, full = durations(run, "idle"), durations(run, "full")
    counted = [rows[step] for step in run.plan.measured("full")]
    gib = [row["perf/max_memory_allocated_gb"] for row in counted if "perf/max_memory_allocated_gb" in row]
    seconds = {"rollout": idle, "train": run.learner["trained"]["seconds"], "step": full}
    # Means over whole cycles: at a lag bound of n, one long wait comes in n + 1 steps.
    roll, train, step = map(statistics.mean, seconds.values())
    tokens = throughput(run, counted, [rows[step] for step in run.plan.measured("idle")], sum(full))
    settings = {name: attrgetter(key)(run.config) for name, key in (pair.split("=") for pair in SETTINGS.split())}
    scaled = roll * tokens["mean_length"] / tokens["mean_length_idle"]
    return {
        "config": case,
        "eta": max(roll, train) / step,
        "eta_same_length": max(scaled, train) / step,
        **{f"t_{name}": statistics.mean(found) for name, found in seconds.items()},
        **{f"t_{name}_p90": quantile(found, 0.9) for name, found in seconds.items()},
        "roll_over_train": roll / train,
        "seconds": seconds,
        "steps": len(full),
        **tokens,
        **idleness(run, counted, full),
        **sync(run, list(rows.values()), counted),
        "sync_idle_s": median(rows[step].get(f"{SYNC}seconds", 0.0) for step in run.plan.measured("idle")),
        **pauses(run),
        "max_lag": max(lag for lag, tokens in tokens_by_lag(rows.values()).items() if tokens),
        "updates_applied": all(row["training/update_applied"] for row in counted),
        "engines_quiet": run.learner.get("quiet"),
        # peaks of the learner's fullest GPU by torch, in GB: what is reserved, and what of it tensors held
        "memory": run.learner["memory"] | ({"learner_allocated_gb": max(gib) * 2**30 / 1e9} if gib else {}),
        "settings": {"length_median": run.options.median, "length_sigma": run.options.sigma, **settings},
        "versions": {**versions("torch", "transformers", "sglang", "pyzmq"), "nccl": run.learner["nccl"]},
        "hardware": [run.learner.get("gpu") or f"{platform.machine()}, {os.cpu_count()} cores"],
        "run_seconds": run.seconds,
        "run_dir": run.config.run_dir,
    }


def durations(run: Finished, phase: Phase) -> list[float]:
    """Seconds from commit to commit, for every step of the phase that counts."""
    at = {int(step): seconds for step, seconds in run.learner["committed_at"].items()}
    return [at[step] - at[step - 1] for step in run.plan.measured(phase)]


def throughput(run: Finished, counted: Sequence[Row], idle_rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """Tokens of the full phase; lengths of both phases, because each has draws of its own."""
    generated = sum(row["response_length/mean"] for row in counted) * run.config.trajectories_per_step
    ranks = run.config.num_learner_ranks
    return {
        "tokens_per_s": generated / seconds,
        "tokens_per_s_per_gpu": generated / seconds / (run.config.num_rollout_devices + ranks),
        "trained_tokens_per_s_per_learner_gpu": sum(row["perf/total_num_tokens"] for row in counted) / seconds / ranks,
        "mean_length": statistics.mean(row["response_length/mean"] for row in counted),
        "mean_length_idle": statistics.mean(row["response_length/mean"] for row in idle_rows),
        "longest": max(row["response_length/max"] for row in counted),
    }


def idleness(run: Finished, counted: Sequence[Row], seconds: Sequence[float]) -> dict[str, Any]:
    """Share of the full phase in which a side had nothing to do: waits of rank 0; decode loops without a request."""
    waited = [row.get("timing_s/wait_batch", 0.0) + row.get("timing_s/publish_wait", 0.0) for row in counted]
    beats = [ratio for step, ratio in run.watcher.idle if step in run.plan.measured("full")]
    # steps may be shorter than a beat
    idle = beats or [row["rollout/idle_ratio"] for row in counted if "rollout/idle_ratio" in row]
    return {
        "learner_idle": min(1.0, sum(waited) / sum(seconds)),
        "rollout_idle": statistics.mean(idle) if idle else None,
        "update_s": median(row["timing_s/update_actor"] for row in counted),
        "param_sync_s": median(row["timing_s/param_sync"] for row in counted),
    }


def sync(run: Finished, rows: Sequence[Row], counted: Sequence[Row]) -> dict[str, Any]:
    """The weight bus: medians of its phases, in the full phase, while the engines decode.

    `sync_s` is from the start of the gather to the last engine's proof; `update_to_verified_s` adds the digests of the
    learner's shards before it, and what of the optimizer step the device still had to do.
    """
    whole = [row for row in counted if f"{SYNC}seconds" in row]
    synced = [{name.removeprefix(SYNC): row[name] for name in row if name.startswith(SYNC)} for row in whole]
    alone = {f"{name}_alone_s": median(seconds) for name, seconds in run.learner.get("alone", {}).items()}
    equal = [bool(row[f"{SYNC}digests_equal"]) for row in rows if f"{SYNC}digests_equal" in row]
    seconds = [row["seconds"] for row in synced]
    commit = statistics.median(row["timing_s/commit"] for row in counted)
    return {
        "sync_s": median(seconds),
        "update_to_verified_s": statistics.median(seconds) + commit if seconds else None,
        "sync_max_s": max(seconds, default=None),
        "bus_phases": medians(synced) | alone,
        "bus_bytes": synced[-1]["bytes"] if synced else None,
        "digests_equal": bool(equal) and all(equal),
        "syncs": len(equal),
    }


def pauses(run: Finished) -> dict[str, Any]:
    """How long decoding stood still. From the engine where it measures gaps between tokens, else from the follower."""
    steady = {key: gauges for key, gauges in sorted(run.watcher.gauges.items()) if key[1] > WARM_UPDATES}
    last = {name: gauges for (name, _), gauges in steady.items()}.values()
    keys = ("pause_ms_p50", "pause_ms_p99", "pause_ms_max")
    found: dict[str, Any] = dict.fromkeys((*keys, "pause_source"))
    if last and all("pause_ms_p99" in gauges for gauges in last):
        found |= {key: max(gauges[key] for gauges in last) for key in keys}
        found["pause_source"] = "engine: gaps between tokens"
    elif steady:
        seconds = [1e3 * gauges["pause_s"] for gauges in steady.values()]
        found |= zip(keys, (median(seconds), max(seconds), max(seconds)), strict=True)
        found["pause_source"] = f"follower: from pause to resume, {len(seconds)} updates seen (p99 is the largest)"
    phases = medians(steady.values())
    found["engine_phases"] = {name: s for name, s in phases.items() if "/" not in name and name != "tokens_per_s"}
    return found


def with_raw(result: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """The result with the bus held against the raw broadcast of the same bytes."""
    wire = result["bus_phases"].get("wire_s", result["bus_phases"].get("send_s"))
    over = {"bus_over_raw": wire, "sync_over_raw": result["sync_s"]}
    return result | raw | {key: s / raw["raw_s"] if s is not None else None for key, s in over.items()}
