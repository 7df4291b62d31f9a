"""GSM8K's and MATH's official files, as they are published, become rows that the built-in rewards judge."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from replay.prompts import load_rows
from rollout_server.rewards.built_in.code_tests import read_tests
from rollout_server.rewards.built_in.numeric import reward as numeric
from scripts import prepare_gsm8k, prepare_math, prepare_mbpp
from scripts.prepare_math import last_boxed

STEPS = "48/2 = <<48/2=24>>24\n48+24 = <<48+24=72>>72\n#### 1,072"
PROBLEM = {
    "problem": "What is $1+1$?",
    "level": "Level 3",
    "type": "Algebra",
    "solution": r"It is $\boxed{\frac{4}{2}}$.",
}


def gsm8k(folder: Path, form: str) -> Path:
    rows = [{"question": f"How many? {n}", "answer": STEPS} for n in range(3)]
    for split in ("train", "test"):
        if form == "jsonl":
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            (folder / "main").mkdir(exist_ok=True)
            parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "main" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_gsm8k(tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_gsm8k.main([str(gsm8k(tmp_path, form)), "--out", str(tmp_path / "out")]) == 0
    assert f"{tmp_path}/out/train.jsonl: 3 rows" in capsys.readouterr().out
    row = load_rows(tmp_path / "out" / "test.jsonl")[2]
    assert row["ground_truth"] == "1072" and row["data_source"] == "openai/gsm8k"
    assert row["prompt"][0]["content"].startswith("How many? 2 Let's think") and row["extra_info"]["index"] == 2
    sample: Any = {**row, "completion": "so #### 1072", "num_tokens": 3, "finish_reason": "stop"}
    assert numeric(sample)["score"] == 1.0


@pytest.mark.parametrize("form", ["archive", "jsonl"])
def test_math(tmp_path: Path, form: str) -> None:
    for split in ("train", "test"):
        if form == "archive":
            folder = tmp_path / split / "algebra"
            folder.mkdir(parents=True)
            for number in (10, 9):
                (folder / f"{number}.json").write_text(json.dumps(PROBLEM | {"problem": f"no. {number}"}))
        else:
            lines = [json.dumps(PROBLEM | {"problem": f"no. {number}"}) + "\n" for number in (9, 10)]
            (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    assert prepare_math.main([str(tmp_path), "--out", str(tmp_path / "out"), "--instruction", ""]) == 0
    rows = load_rows(tmp_path / "out" / "train.jsonl")
    assert [row["prompt"][0]["content"] for row in rows] == ["no. 9", "no. 10"]
    assert rows[0]["ground_truth"] == r"\frac{4}{2}" and rows[0]["columns"]["difficulty"] == 3


def test_mbpp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tests = ["assert math.isclose(half(3), 1.5)", "assert half(2) == 1"]
    task = {"text": "Halve.", "test_setup_code": "import math", "test_list": tests}
    lines = [json.dumps(task | {"task_id": number}) + "\n" for number in (1, 11, 510, 601, 974)]
    (tmp_path / "mbpp.jsonl").write_text("".join(lines))
    assert prepare_mbpp.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    for split, numbers in (("train", [601, 974]), ("test", [11, 510])):
        rows = load_rows(tmp_path / "out" / f"{split}.jsonl")
        assert [row["extra_info"]["task_id"] for row in rows] == numbers
    assert f"{tests[0]}\nWrite the function" in rows[0]["prompt"][0]["content"]
    assert sum(test.count for test in read_tests(rows[0]["ground_truth"], 20)) == 2
    (tmp_path / "mbpp.jsonl").write_text(json.dumps(task | {"task_id": 601, "test_list": "assert half(2) == 1"}))
    assert prepare_mbpp.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "mbpp.jsonl: row 1: no MBPP, which has the columns text and test_list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"$\boxed{5}$", "5"),
        (r"\boxed{1}, no, \boxed{\text{(a)} {b}}", r"\text{(a)} {b}"),
        (r"so $\fbox{7}$.", "7"),
        (r"so $\boxed 9$ it is", "9"),
        (r"\boxed{cut", None),
        (r"\boxed{}", None),
        ("none", None),
    ],
)
def test_the_last_box_counts(solution: str, answer: str | None) -> None:
    assert last_boxed(solution) == answer


def test_what_is_no_gsm8k_and_no_math_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare_gsm8k.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "neither train.jsonl nor train*.parquet is in it" in capsys.readouterr().err
    (tmp_path / "train.jsonl").write_text(json.dumps(PROBLEM | {"solution": "no box"}) + "\n")
    assert prepare_math.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "row 1: the solution has no \\boxed{} with something in it: 'no box'" in capsys.readouterr().err
    assert not (tmp_path / "out" / "train.jsonl").exists()


def test_rows_that_are_no_gsm8k_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "#### 2"}\n')
    assert prepare_gsm8k.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 1
    assert "train.jsonl: row 1: no GSM8K" in capsys.readouterr().err
