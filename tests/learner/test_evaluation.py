"""Evaluations on disk and in metrics: every data source by its own name, every answer with what was asked."""

import json

import numpy as np
import pytest
from tiny_models import make_config

from learner.report import evaluation
from replay.messages import EvaluationResult
from replay.prompts import DataError

ROWS = [
    {"prompt": "1+1=", "answer": "2", "data_source": "sums"},
    {"prompt": [{"role": "user", "content": "7?"}], "answer": "odd", "data_source": "parity"},
    {"prompt": "2+2=", "answer": "4", "data_source": "sums"},
    {"prompt": "never asked", "answer": "", "data_source": "sums"},
]
RESULT = EvaluationResult(
    version=3,
    greedy=True,
    seconds=1.5,
    texts=["2", "even", "5"],
    finish_reasons=["stop", "stop", "length"],
    rewards=np.array([1.0, 0.25, 0.0], np.float32),
    lengths=np.array([1, 2, 3], np.int32),
)


@pytest.fixture
def rows(tmp_path):
    """Rows of data.eval in a folder of another name, three of which are asked for."""
    file = tmp_path / "elsewhere" / "eval.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = make_config(
        tmp_path, data={"eval": str(file)}, evaluation={"every_steps": 1, "num_prompts": 3}, run={"dir": str(tmp_path)}
    )
    return evaluation.evaluation_rows(config)


def test_every_data_source_has_its_own_metrics(rows):
    scores = {"val-core/sums/greedy": 0.5, "val-core/parity/greedy": 0.25}
    scores |= {f"val-aux/{source}/greedy/response_length": 2.0 for source in ("sums", "parity")}
    scores |= {f"val-aux/{source}/greedy/seconds": 1.5 for source in ("sums", "parity")}
    assert evaluation.values(RESULT, rows) == scores


def test_an_answer_stands_beside_what_was_asked(rows, tmp_path):
    path = evaluation.write_rows(str(tmp_path), RESULT, rows)
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "version_3_greedy.jsonl"
    assert [row["prompt"] for row in written] == [row["prompt"] for row in ROWS[:3]]
    found = [(row["ground_truth"], row["text"], row["reward"]) for row in written]
    assert found == [("2", "2", 1.0), ("odd", "even", 0.25), ("4", "5", 0.0)]
    with pytest.raises(DataError, match=r"version 3: 3 answers, data\.eval has 2 rows now"):
        evaluation.write_rows(str(tmp_path), RESULT, rows[:2])
