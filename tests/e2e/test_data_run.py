"""Runs over several datasets in several formats, in an order that follows the answers, survive kills and resumes."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

datasets = pytest.importorskip("datasets", reason="extra datasets is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

CLASS = """
import json, pathlib

class Mine:
    def __init__(self, file):
        self.rows = [json.loads(line) for line in pathlib.Path(file).read_text().splitlines()]
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, number):
        return self.rows[number]
"""


def written(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """20 rows of each form, and their weights: passes are short, so that several begin within few steps."""
    text = "".join(json.dumps(row) + "\n" for row in rows[:20])
    (folder / "a.jsonl").write_text(text)
    (folder / "b").mkdir()
    verl = [
        {"prompt": row["prompt"], "reward_model": {"ground_truth": row["answer"]}, "data_source": "b"} for row in rows
    ]
    parquet.write_table(pyarrow.Table.from_pylist(verl[20:30]), folder / "b" / "0.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(verl[30:40]), folder / "b" / "1.parquet")
    slime = [{"prompt": row["prompt"], "label": row["answer"]} for row in rows[40:60]]
    datasets.Dataset.from_list(slime).save_to_disk(str(folder / "c"))
    (folder / "mine.py").write_text(CLASS)
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[60:80]))
    names = {"a": "a.jsonl", "b": "b", "c": "c", "d": f"mine.py:Mine?file={folder}/d.jsonl"}
    return {name: {"path": f"{folder}/{value}", "weight": 1 + (name == "b")} for name, value in names.items()}


def test_a_run_over_four_formats_is_killed_resumed_and_its_journal_trained_again(launch, tmp_path):
    rows = [json.loads(line) for line in (launch.input.folder / "train.jsonl").read_text().splitlines()]
    train = json.dumps(written(tmp_path, rows))
    settings = ("data.curriculum=pass_rate", "checkpoint.every_steps=2", "replay.journal_keep=all")
    run = launch(f"data.train={train}", *settings, "evaluation.solved_at=0.5", steps=12, split="1:1")
    run.wait_for_step(5)
    run.kill("replay.main")
    assert run.wait() == 0, run.text()[-3000:]
    again = launch.resume(run.folder, "--steps", "16")
    assert again.wait() == 0, again.text()[-3000:]
    groups = run.groups()
    assert len(groups) == len(set(groups)) == 16 * 16
    drawn = {key: value for key, value in run.steps()[-1].items() if key.startswith("prompts/drawn/")}
    shares = {key: value / sum(drawn.values()) for key, value in drawn.items()}
    assert [round(shares[f"prompts/drawn/{name}"], 1) for name in "abcd"] == [0.2, 0.4, 0.2, 0.2]
    for name, said in (("a", "JSONL, read as own"), ("b", "2 files of parquet, read as verl"), ("c", "read as slime")):
        assert said in run.log("replay"), name
    print([line for line in run.log("replay").splitlines() if "read as" in line][:4])
    played = launch.start(["learner.main", "--replay", str(run.folder)], run.folder)
    assert played.wait() == 0, played.text()[-3000:]
    (found,) = [json.loads(line) for line in played.text().splitlines() if line.startswith("{")]
    assert found["equal"] == found["steps"] == 16, found
