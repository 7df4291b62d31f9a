"""The results as markdown tables. Imports nothing of ours."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]


def seconds(value: float | None) -> str:
    """Seconds above one, else milliseconds."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def number(value: float | None) -> str:
    """Three digits, or thousands."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def both(value: str, tail: str) -> Callable[[Result], str]:
    """A median and its 90th percentile."""
    return lambda r: f"{seconds(r[value])} / {seconds(r[tail])}"


COLUMNS: dict[str, Callable[[Result], str]] = {
    "config": lambda r: str(r["config"]),
    "eta": lambda r: f"{r['eta']:.3f}",
    "T_roll / p90": both("t_rollout", "t_rollout_p90"),
    "T_train / p90": both("t_train", "t_train_p90"),
    "T_step / p90": both("t_step", "t_step_p90"),
    "roll/train": lambda r: f"{r['roll_over_train']:.2f}",
    "stream/roll": lambda r: number(r.get("stream_over_roll")),
    "tokens/s": lambda r: number(r["tokens_per_s"]),
    "trained tokens/s/GPU": lambda r: number(r["trained_tokens_per_s_per_learner_gpu"]),
    "mean length": lambda r: f"{r['mean_length']:.0f} ({r['mean_length_idle']:.0f} in T_roll)",
    "idle rollout, learner": lambda r: f"{number(r['rollout_idle'])}, {number(r['learner_idle'])}",
    "max lag": lambda r: str(r["max_lag"]),
}

BUS_COLUMNS: dict[str, Callable[[Result], str]] = {
    "config": lambda r: str(r["config"]),
    "GB": lambda r: number(r["bus_bytes"] / 1e9 if r["bus_bytes"] else None),
    "raw": lambda r: seconds(r.get("raw_s")),
    "wire/raw": lambda r: number(r.get("bus_over_raw")),
    "gather to verified": lambda r: seconds(r["sync_s"]),
    "update to verified": lambda r: seconds(r["update_to_verified_s"]),
    "sync/raw": lambda r: number(r.get("sync_over_raw")),
    "phases": lambda r: phases(r["bus_phases"]),
    "in the server": lambda r: phases(r["engine_phases"]),
    "pause p50, p99": lambda r: f"{milliseconds(r['pause_ms_p50'])}, {milliseconds(r['pause_ms_p99'])}",
    "digests equal": lambda r: f"{str(r['digests_equal']).lower()} ({r['syncs']})",
    "memory": lambda r: ", ".join(f"{name} {value:.1f}" for name, value in r["memory"].items()) or "-",
}


def milliseconds(value: float | None) -> str:
    """Of a value that is in milliseconds."""
    return "-" if value is None else f"{value:.1f} ms"


def phases(found: Mapping[str, float | None]) -> str:
    """`pack 1.2 ms, send 0.9 ms`."""
    return ", ".join(f"{name.removesuffix('_s')} {seconds(value)}" for name, value in found.items()) or "-"


def tables(results: Sequence[Result]) -> str:
    """Two tables of the cases that have a result, and a line for each that has none."""
    good = [result for result in results if "error" not in result]
    parts = [render(columns, good) for columns in (COLUMNS, BUS_COLUMNS) if good]
    sources = sorted({str(result["pause_source"]) for result in good})
    if good:
        parts.append(f"Pauses by {'; '.join(sources)}.")
    lines = [f"{r['config']}: no result: {r['error']}" for r in results if "error" in r]
    return "\n\n".join([*parts, *lines])


def render(columns: Mapping[str, Callable[[Result], str]], results: Sequence[Result]) -> str:
    """A markdown table with one row a result."""
    lines = [list(columns), ["---"] * len(columns)]
    lines += [[column(result) for column in columns.values()] for result in results]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
