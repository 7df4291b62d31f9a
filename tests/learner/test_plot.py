"""plots/summary.png from whatever metrics.jsonl holds."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from learner.report import plot
from learner.report.metrics import MetricsError

STEP: dict[str, Any] = {
    "step": 1,
    "time": 1000.0,
    "critic/score/mean": 0.4,
    "training/lag_histogram": {"0": 10, "1": 990},
    "trainer/idle_ratio": 0.1,
    "rollout/idle_ratio": 0.3,
}
EVALUATION = {"version": 1, "time": 1000.0, "val-core/sort6/greedy": 0.5}


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize(
    "rows",
    [
        [{**STEP, "step": step} for step in range(1, 81)] + [{**EVALUATION, "version": v} for v in range(0, 81, 5)],
        [STEP],
        [EVALUATION],
        [{"step": 1}],
        [{"step": 1, "time": 1.0, "critic/score/mean": None, "training/lag_histogram": {}}],
        [STEP, {**STEP, "step": 2, "critic/score/mean": -30.5}, {**EVALUATION, "val-core/sort6/greedy": None}],
        [{**STEP, "training/lag_histogram": {str(lag): 100 for lag in range(9)}}],
        [STEP, {"version": 1, "final": True, "weight_sync/seconds": 0.1}],
    ],
)
def test_a_picture_is_drawn_of_every_run(tmp_path, rows):
    path = plot.plot_run(write(tmp_path, *rows))
    assert path == tmp_path / "plots" / "summary.png"
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 1000
        extrema = image.convert("L").getextrema()
    assert extrema[0] < 128 < extrema[1], "the picture is blank"
    assert [p.name for p in (tmp_path / "plots").iterdir()] == ["summary.png"]


@pytest.mark.parametrize("text", [None, "", '{"version": 1, "final": true}\n'])
def test_a_run_without_numbers_is_an_error_with_a_way_out(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(MetricsError, match=r"metrics\.jsonl: (missing; name the folder|no step and no evaluation yet)"):
        plot.plot_run(tmp_path)


def test_lags_are_summed_over_steps():
    steps = [
        {"training/lag_histogram": {"1": 5, "4": 1}},
        {"training/lag_histogram": {"1": 7}},
        {"training/lag_histogram": None},
        {},
    ]
    assert plot.tokens_by_lag(steps) == {1: 12, 4: 1}
    assert plot.tokens_by_lag([]) == {}


def test_the_newest_evaluation_of_a_version_counts_and_versions_ascend():
    rows = [
        {"version": 10, "val-core/x/greedy": 0.7},
        {"version": 0, "val-core/x/greedy": 0.3, "val-core/x/sampled": None},
        {"version": 10, "val-core/x/greedy": 0.8},
    ]
    assert plot.curves(rows) == {"greedy": ([0, 10], [0.3, 0.8])}


@given(st.lists(st.floats(-100, 100), max_size=30), st.integers(1, 8))
def test_smoothing_is_the_mean_of_the_past(values, width):
    drawn = plot.smoothed(values, width)
    assert len(drawn) == len(values)
    for i, value in enumerate(drawn):
        past = values[max(0, i + 1 - width) : i + 1]
        assert math.isclose(value, math.fsum(past) / len(past), abs_tol=1e-9)


def test_command_line(tmp_path, capsys):
    assert plot.main([str(write(tmp_path, STEP, EVALUATION))]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "plots" / "summary.png")
    assert plot.main([str(tmp_path / "nowhere")]) == 2
