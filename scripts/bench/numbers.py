"""From a finished pipeline run to its numbers."""

import importlib.metadata
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.machine import visible_devices
from learner.report.metrics import FILE, read_rows
from scripts.bench.core import Row, ask_gpus, median, p90
from scripts.bench.train import Finished, Phase

WARM_UPDATES = 2
"""A server's first weight updates allocate and connect; their pauses are not counted."""
NOT_PHASES = {"weight_sync/seconds"}


def result_of(case: str, run: Finished) -> dict[str, Any]:
    """All numbers of a run but those that are held against the raw broadcast."""
    rows = {row["step"]: row for row in read_rows(Path(run.config.run_dir) / FILE) if "step" in row}
    idle, full = durations(run, "idle"), durations(run, "full")
    counted = [rows[step] for step in run.measured("full")]
    alone = run.learner["trained"].get("seconds")
    trained = alone or [row["timing_s/update_actor"] for row in counted]
    idle_rows = [rows[step] for step in run.measured("idle")]
    # Means: with a lag bound of one, steps come in pairs, a long wait and none.
    roll, train, step = map(statistics.mean, (idle, trained, full))
    tokens = throughput(run, counted, idle_rows, sum(full))
    scaled = roll * tokens["mean_length"] / tokens["mean_length_idle"]
    return {
        "config": case,
        "eta": max(roll, train) / step,
        "eta_same_length": max(scaled, train) / step,
        "t_rollout": roll,
        "t_rollout_p90": p90(idle),
        "t_train": train,
        "t_train_p90": p90(trained),
        "t_train_source": "updates alone" if alone else "updates of the steps of T_step, engines busy",
        "cut_short": run.cut_short,
        "t_step": step,
        "t_step_p90": p90(full),
        "roll_over_train": roll / train,
        "seconds": {"rollout": idle, "train": trained, "step": full},
        "steps": len(full),
        **tokens,
        **idleness(run, counted, full),
        **sync(run, list(rows.values()), counted),
        **pauses(run),
        "max_lag": max(int(lag) for row in rows.values() for lag, n in row["training/lag_histogram"].items() if n),
        "updates_applied": all(row["training/update_applied"] for row in counted),
        "engines_quiet": run.learner.get("quiet"),
        **memory(run, counted),
        **circumstances(run),
    }


def durations(run: Finished, phase: Phase) -> list[float]:
    """Seconds from commit to commit, for every step of the phase that counts."""
    at = {int(step): seconds for step, seconds in run.learner["committed_at"].items()}
    return [at[step] - at[step - 1] for step in run.measured(phase)]


def throughput(run: Finished, counted: Sequence[Row], idle_rows: Sequence[Row], seconds: float) -> dict[str, Any]:
    """Tokens and seconds of the full phase; lengths of both phases, because each has draws of its own."""
    answers = run.config.trajectories_per_step
    generated = sum(row["response_length/mean"] for row in counted) * answers
    processed = sum(row["perf/total_num_tokens"] for row in counted)
    devices = run.config.num_rollout_devices + run.config.num_learner_ranks
    return {
        "tokens_per_s": generated / seconds,
        "tokens_per_s_per_gpu": generated / seconds / devices,
        "trained_tokens_per_s_per_learner_gpu": processed / seconds / run.config.num_learner_ranks,
        "mean_length": statistics.mean(row["response_length/mean"] for row in counted),
        "mean_length_idle": statistics.mean(row["response_length/mean"] for row in idle_rows),
        "longest": max(row["response_length/max"] for row in counted),
    }


def idleness(run: Finished, counted: Sequence[Row], seconds: Sequence[float]) -> dict[str, Any]:
    """Share of the full phase in which a side had nothing to do: waits of rank 0; decode loops without a request.

    `rollout_idle_alone` is that of the idle phase: what the admission barrier leaves empty.
    """
    waited = [row.get("timing_s/wait_batch", 0.0) + row.get("timing_s/publish_wait", 0.0) for row in counted]
    beats: dict[Phase, list[float]] = {
        phase: [ratio for step, ratio in run.watcher.idle if step in set(run.measured(phase))]
        for phase in ("idle", "full")
    }
    if not beats["full"]:  # steps shorter than a beat
        beats["full"] = [row["rollout/idle_ratio"] for row in counted if "rollout/idle_ratio" in row]
    return {
        "learner_idle": min(1.0, sum(waited) / sum(seconds)),
        "rollout_idle": statistics.mean(beats["full"]) if beats["full"] else None,
        "rollout_idle_alone": statistics.mean(beats["idle"]) if beats["idle"] else None,
        "update_s": median(row["timing_s/update_actor"] for row in counted),
        "param_sync_s": median(row["timing_s/param_sync"] for row in counted),
    }


def sync(run: Finished, rows: Sequence[Row], counted: Sequence[Row]) -> dict[str, Any]:
    """The weight bus: medians of its phases, in the full phase, while the engines decode.

    `sync_s` is from the start of the gather to the last engine's proof; `update_to_verified_s` adds the digests of the
    learner's shards before it, and what of the optimizer step the device still had to do.
    """
    synced = [row for row in counted if "weight_sync/seconds" in row]
    names = {name for row in synced for name in row if name.startswith("weight_sync/") and name.endswith("_s")}
    phases = {
        name.removeprefix("weight_sync/"): median(row[name] for row in synced if name in row)
        for name in sorted(names - NOT_PHASES)
    }
    alone = {f"{name}_alone_s": median(seconds) for name, seconds in run.learner.get("alone", {}).items()}
    equal = [bool(row["weight_sync/digests_equal"]) for row in rows if "weight_sync/digests_equal" in row]
    whole = median(row["weight_sync/seconds"] for row in synced)
    commit = median(row["timing_s/commit"] for row in counted)
    return {
        "sync_s": whole,
        "update_to_verified_s": whole + commit if whole is not None and commit is not None else None,
        "sync_max_s": max((row["weight_sync/seconds"] for row in synced), default=None),
        "bus_phases": phases | alone,
        "bus_bytes": synced[-1]["weight_sync/bytes"] if synced else None,
        "digests_equal": bool(equal) and all(equal),
        "syncs": len(equal),
    }


def pauses(run: Finished) -> dict[str, Any]:
    """How long decoding stood still. From the engine where it measures gaps between tokens, else from the follower."""
    steady = {key: gauges for key, gauges in run.watcher.gauges.items() if key[1] > WARM_UPDATES}
    last = {name: gauges for (name, _), gauges in sorted(steady.items())}
    found: dict[str, Any] = {"pause_ms_p50": None, "pause_ms_p99": None, "pause_ms_max": None, "pause_source": None}
    if last and all("pause_ms_p99" in gauges for gauges in last.values()):
        for key in ("pause_ms_p50", "pause_ms_p99", "pause_ms_max"):
            found[key] = max(gauges.get(key, 0.0) for gauges in last.values())
        found["pause_source"] = "engine: gaps between tokens"
    elif steady:
        seconds = [1e3 * gauges["pause_s"] for gauges in steady.values()]
        found |= {"pause_ms_p50": median(seconds), "pause_ms_p99": max(seconds), "pause_ms_max": max(seconds)}
        found["pause_source"] = f"follower: from pause to resume, {len(seconds)} updates seen (p99 is the largest)"
    others = {name for gauges in steady.values() for name in gauges if name.endswith("_s") and "/" not in name}
    others -= {"tokens_per_s"}
    found["engine_phases"] = {
        name: median(gauges[name] for gauges in steady.values() if name in gauges) for name in sorted(others)
    }
    return found


def memory(run: Finished, counted: Sequence[Row]) -> dict[str, Any]:
    """Peaks, in GB: of each side's fullest GPU by nvidia-smi, and of the learner's fullest rank by torch."""
    share, used, visible = run.config.shares[0], run.watcher.used_mib, visible_devices(os.environ)
    found = dict(run.learner["memory"])
    allocated = [row[name] for row in counted if (name := "perf/max_memory_allocated_gb") in row]
    if allocated:
        found["learner_allocated_gb"] = max(allocated) * 2**30 / 1e9  # that metric counts in GiB
    if run.config.placement.device == "cuda" and used:
        index = [int(v) for v in visible] if visible and all(v.isdigit() for v in visible) else sorted(used)
        for side, devices in (("rollout", share.rollout), ("learner", share.learner)):
            peaks = [used[index[i]] for i in devices if i < len(index) and index[i] in used]
            if peaks:
                found[f"{side}_gpu_gb"] = max(peaks) * 2**20 / 1e9
    return {"memory": found}


def circumstances(run: Finished) -> dict[str, Any]:
    """What the numbers were measured with, and on."""
    rollout, learner = run.config.rollout, run.config.learner
    versions = {name: installed(name) for name in ("torch", "transformers", "sglang", "pyzmq")}
    return {
        "settings": {
            "prompt": run.config.data.max_prompt_tokens,
            "length_median": run.options.median,
            "length_sigma": run.options.sigma,
            "length_cap": rollout.max_new_tokens,
            "groups": rollout.groups_per_step,
            "group_size": rollout.group_size,
            "lag": run.config.replay.async_lag,
            "engine": rollout.engine,
            "max_running": rollout.max_running,
            "dtype": rollout.dtype,
            "backend": run.config.weight_bus.backend,
            "apply": run.config.weight_bus.apply,
            "bucket_bytes": run.config.weight_bus.bucket_bytes,
            "microbatch_tokens": learner.max_tokens_per_microbatch,
            "lr": learner.lr,
            "seed": run.config.run.seed,
        },
        "versions": {**versions, "python": platform.python_version(), "nccl": run.learner["nccl"]},
        "hardware": ask_gpus("name") or [f"{platform.machine()}, {os.cpu_count()} cores"],
        "run_seconds": run.seconds,
        "run_dir": run.config.run_dir,
    }


def with_raw(result: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """The result with the bus held against the raw broadcast of the same bytes."""
    phases = result["bus_phases"]
    wire = phases.get("wire_s", phases.get("send_s"))
    seconds = raw["raw_s"]
    return {
        **result,
        **raw,
        "bus_over_raw": wire / seconds if wire is not None else None,
        "sync_over_raw": result["sync_s"] / seconds if result["sync_s"] is not None else None,
    }


def with_stream(result: dict[str, Any], run: Finished) -> dict[str, Any]:
    """The result with what the admission barrier costs: the same rollouts at lag 8, with a learner that only takes."""
    stream = statistics.mean(durations(run, "idle"))
    return {**result, "t_stream": stream, "stream_over_roll": stream / result["t_rollout"]}


def installed(name: str) -> str | None:
    """Version of a package, or None."""
    version: Callable[[str], str] = importlib.metadata.version
    try:
        return version(name)
    except importlib.metadata.PackageNotFoundError:
        return sys.modules[name].__version__ if name in sys.modules else None
