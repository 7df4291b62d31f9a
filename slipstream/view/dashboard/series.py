"""Curves of metrics.jsonl for the charts, thinned to what a screen can show."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from learner.record.metrics import tokens_by_lag
from learner.record.summary import curves
from slipstream.view.live_text import MetricRows, Row

MAX_POINTS = 1500
MAX_CHOSEN = 60
"""Metrics in one answer."""
HEAD = {"step", "time", "training/global_step"}
"""In every row, and no curves."""
PANELS: Sequence[tuple[str, str, Mapping[str, str]]] = (
    ("Reward", "", {"critic/score/mean": "mean"}),
    ("Loss of answers in the data", "nats", {"sft/loss": "SFT"}),
    ("Lag of trained tokens", "versions", {
        "training/off_policy/trajectory_staleness/mean": "mean",
        "training/off_policy/trajectory_staleness/max": "max",
    }),
    ("Entropy", "nats", {"actor/entropy": "entropy"}),
    ("KL of behaviour and trained policy", "nats", {"actor/ppo_kl": "k1", "actor/ppo_kl_k3": "k3"}),
    ("Effective sample size", "share", {"training/ess": "ESS"}),
    ("Idle", "share", {"trainer/idle_ratio": "learner", "rollout/idle_ratio": "rollout servers"}),
    ("Clipped tokens", "share", {"actor/pg_clipfrac": "clipped"}),
    ("Gradient norm", "", {"actor/grad_norm": "norm"}),
    ("Answer length", "tokens", {"response_length/mean": "mean", "response_length/max": "max"}),
    ("Throughput", "tokens/s", {"perf/learner_tokens_per_s": "learner", "rollout/tokens_per_s": "rollout servers"}),
    ("Seconds of a step", "s", {
        "timing_s/step": "step", "timing_s/wait_batch": "wait", "timing_s/update_actor": "train",
        "timing_s/publish_wait": "publish",
    }),
    ("Groups in flight", "groups", {
        "buffer/leased": "leased", "buffer/size": "buffered", "buffer/dropped": "dropped so far",
    }),
)  # fmt: skip
"""Title, unit, and metrics with their labels (docs/metrics.md)."""


def of(progress: MetricRows, rows: Sequence[Row]) -> dict[str, Any]:
    """What the overview shows of a run.

    `panels` have a `step` axis, and per line mean values, with `low` and `high` beside them where a point stands for
    several steps; `evaluations` are (versions, scores) by mode; values that were not finite are null.
    """
    steps, bounds = progress.steps, _bounds(progress.steps)
    return {
        "step": progress.step,
        "last": {name: value for name, value in progress.last.items() if isinstance(value, int | float)},
        "names": _names(steps),
        "axis": _axis(steps, bounds),
        "panels": [
            {"title": title, "unit": unit, "lines": [_line(steps, bounds, *line) for line in metrics.items()]}
            for title, unit, metrics in PANELS
        ],
        "evaluations": curves(rows),
        "lag_tokens": tokens_by_lag(steps),
    }


def chosen(steps: Sequence[Row], names: Sequence[str]) -> dict[str, Any]:
    """A panel for each of these metrics, as `of` has them. Raises ValueError: too many."""
    if len(names) > MAX_CHOSEN:
        raise ValueError(f"{len(names)} metrics at once, {MAX_CHOSEN} are allowed")
    bounds = _bounds(steps)
    panels = [{"title": name, "unit": "", "lines": [_line(steps, bounds, name, "")]} for name in names]
    return {"axis": _axis(steps, bounds), "panels": panels}


def _names(steps: Sequence[Row]) -> list[str]:
    """Metrics that are numbers, of some fifty rows over the whole run: a million values would take a second."""
    rows = [*steps[:: 1 + len(steps) // 50], *steps[-1:]]
    return sorted({name for row in rows for name, value in row.items() if isinstance(value, int | float)} - HEAD)


def _bounds(steps: Sequence[Row]) -> np.ndarray[Any, Any]:
    """Where the steps of each point of a curve begin and end."""
    return np.linspace(0, len(steps), min(len(steps), MAX_POINTS) + 1).astype(int)


def _axis(steps: Sequence[Row], bounds: np.ndarray[Any, Any]) -> list[int]:
    return [int(steps[end - 1]["step"]) for end in bounds[1:]]


def _line(steps: Sequence[Row], bounds: np.ndarray[Any, Any], name: str, label: str) -> dict[str, Any]:
    values = np.array([_number(row.get(name)) for row in steps], np.float64)
    line: dict[str, Any] = {"name": name, "label": label}
    if len(bounds) - 1 == len(values):
        return {**line, "mean": _plain(values)}
    cells = [values[start:end][~np.isnan(values[start:end])] for start, end in itertools.pairwise(bounds)]
    for key, reduce in (("mean", np.mean), ("low", np.min), ("high", np.max)):
        line[key] = _plain(np.array([reduce(cell) if len(cell) else np.nan for cell in cells]))
    return line


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _plain(values: np.ndarray[Any, Any]) -> list[float | None]:
    return [None if math.isnan(value) else float(f"{value:.5g}") for value in values.tolist()]
