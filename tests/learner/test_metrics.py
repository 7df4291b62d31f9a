"""metrics.jsonl: one row per step, strict JSON, resumable; trackers. Its names: tests/test_docs.py."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from configs.data import Tracking
from learner.record.metrics import Metrics, MetricsError, Spans, read_rows


def open_metrics(folder: Path, resume_step: int | None = None, **tracking: Any) -> Metrics:
    return Metrics(folder, Tracking(**tracking), {"run": {"seed": 7}}, resume_step=resume_step)


def strict(path: Path) -> list[dict[str, Any]]:
    """Rows by a parser that refuses NaN."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_row_is_one_line_and_on_disk_at_once(tmp_path):
    recorder = open_metrics(tmp_path)
    recorder.log(1, {"critic/score/mean": np.float32(0.5), "training/lag_histogram": {"0": 3, "1": np.int64(4)}})
    (row,) = strict(tmp_path / "metrics.jsonl")
    values = {"step": 1, "training/global_step": 1, "critic/score/mean": 0.5, "metrics/nonfinite": 0}
    assert row == values | {"training/lag_histogram": {"0": 3, "1": 4}, "time": row["time"]} and row["time"] > 1.6e9
    recorder.close()


def test_nonfinite_numbers_become_null_and_are_counted(tmp_path):
    recorder = open_metrics(tmp_path)
    values = {"actor/pg_loss": math.nan, "actor/grad_norm": torch.tensor(math.inf), "map": {"a": -math.inf, "b": 1}}
    recorder.log(1, values)
    recorder.log_evaluation(1, {"val-core/x/greedy": np.float64("nan")})
    recorder.close()
    step, evaluation = strict(tmp_path / "metrics.jsonl")
    assert step["actor/pg_loss"] is None and step["actor/grad_norm"] is None and step["map"] == {"a": None, "b": 1}
    assert step["metrics/nonfinite"] == 3
    assert evaluation["metrics/nonfinite"] == 1


def test_spans_add_up_nest_and_start_again():
    span = Spans()
    with span("step"):
        for _ in range(2):
            with span("wait_batch"):
                pass
    with pytest.raises(ZeroDivisionError), span("update_actor"):
        raise ZeroDivisionError
    seconds = span.take()
    assert seconds["timing_s/step"] >= seconds["timing_s/wait_batch"] > 0 and seconds["timing_s/update_actor"] > 0
    assert span.take() == {}


def test_resume_moves_later_rows_aside_and_a_new_start_all(tmp_path):
    path = tmp_path / "metrics.jsonl"
    recorder = open_metrics(tmp_path)
    for step in range(1, 6):
        recorder.log(step, {"critic/score/mean": step / 10})
        recorder.log_evaluation(step, {"val-core/x/greedy": 0.0})
    recorder.close()
    with path.open("a") as file:
        file.write('{"step": 6, "ti')  # the process was killed here

    recorder = open_metrics(tmp_path, resume_step=3)
    recorder.log_evaluation(3, {"val-core/x/greedy": 0.0})
    recorder.log(4, {"critic/score/mean": 9.0})
    recorder.close()
    rows = strict(path)
    assert [row["step"] for row in rows if "step" in row] == [1, 2, 3, 4]
    assert [row["version"] for row in rows if "version" in row] == [1, 2, 3]
    assert rows[-1]["critic/score/mean"] == 9.0
    discarded = (tmp_path / "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line).get("step") for line in discarded[:-1]] == [None, 4, None, 5, None]
    assert discarded[-1] == '{"step": 6, "ti'
    open_metrics(tmp_path).close()
    assert path.read_text() == ""


def test_reading_waits_for_the_end_of_a_line_and_names_a_broken_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_rows(path) == [{"step": 1}]
    path.write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(MetricsError, match="line 2: 'hello"):
        read_rows(path)
