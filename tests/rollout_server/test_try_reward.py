"""`python -m rollout_server.try_reward` on a data file and on the trajectories that a run has saved."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_server import try_reward
from tests.rollout_server.test_tasks import ids, save_tokenizer

ROWS = [
    {"question": "1+1?", "answer": "so #### 2", "reply": "It is #### 2"},
    {"question": "1+2?", "answer": "so #### 3", "reply": "It is #### 4"},
    {"question": "1+3?", "answer": "so #### 4", "reply": "boom"},
]
GRADER = """
def reward(sample):
    if sample["completion"] == "boom":
        raise ValueError("of the grader")
    return {"score": float(sample["completion"].endswith(str(sample["ground_truth"]))), "tokens": sample["num_tokens"]}
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "grader.py").write_text(GRADER)
    return path


def tried(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    code = try_reward.main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_given_answers_and_ground_truths_of_a_data_file(data: Path, capsys: Any) -> None:
    grader = f"{data.parent}/grader.py:reward"
    code, out, _ = tried(
        capsys, str(data), "--answers", "reply", "--set", f"reward.function={{{grader}: 1, numeric: 0.5}}",
        "--set", f"model.path={data.parent}/none",
    )  # fmt: skip
    assert code == 1 and "row 3: ValueError: of the grader" in out
    assert "3 answers, 1 errors; score mean 0.75, min 0, max 1.5; a call" in out
    assert "grader.reward" in out and "numeric" in out and "num_tokens are words" in out
    code, out, _ = tried(capsys, str(data), "-n", "2", "--as", "#### {}", "--set", "reward.function=numeric")
    assert code == 0 and "2 answers, 0 errors; score mean 1, min 1, max 1" in out and "'#### 3'" in out


def test_what_cannot_be_judged_is_said(data: Path, capsys: Any) -> None:
    turn = ("--set", "environment.turn_timeout_s=30")
    for arguments, said in (
        ([str(data), "--answers", "replies"], "--answers replies: row 1 has no such column; it has"),
        ([str(data.parent / "none.jsonl")], "no such file"),
        ([str(data), "--set", "reward.function=numerc"], "did you mean 'numeric'"),
        ([str(data.parent)], "no saved trajectories"),
        ([str(data.parent), "--set", "environment.function=tools", *turn], "are episodes of environment.function"),
    ):
        code, _, err = tried(capsys, *arguments)
        assert code == 2 and said in err, err


def test_saved_trajectories_of_a_run_are_judged_again(data: Path, tmp_path: Path, capsys: Any) -> None:
    model = save_tokenizer(tmp_path / "model")
    run = tmp_path / "run"
    folder = run / "rollouts" / "step_2"
    folder.mkdir(parents=True)
    rows = [{"prompt": "12=", "ground_truth": "12"}, {"prompt": "21=", "ground_truth": "21"}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": r["prompt"], "answer": r["ground_truth"]}) + "\n" for r in rows))
    (run / "config.yaml").write_text(
        json.dumps({"model": {"path": str(model)}, "data": {"train": str(prompts)}, "reward": {"function": "exact"}})
    )
    records = [
        {"trajectory": 0, "group": [0, 1], "score": 1.0, "response_ids": [*ids("21"), 1]},
        {"trajectory": 1, "group": [0, 0], "score": 1.0, "response_ids": [*ids("21"), 1]},
        {"trajectory": 2, "group": [0, 0], "score": 0.0, "response_ids": ids("12"), "text": "12\u2028\u0085"},
    ]
    asked = [{"prompt_ids": ids(rows[record["group"][1]]["prompt"])} | record for record in records]
    whole = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in asked).encode()
    cut = '{"trajectory": 3, "text": "…'.encode()[:-1]  # the run writes it at this moment, or was killed there
    (folder / "rank_0.jsonl").write_bytes(whole + cut)
    code, out, err = tried(capsys, str(run))
    assert code == 0, err
    assert "step_2/0" in out and "recorded" in out and "1 of 3 differ from the score in the run" in out
    assert "score mean 0.3333" in out
    function = tmp_path / "judge.py"
    function.write_text("async def reward(sample):\n    return 100.1\n")
    for scores, changed in (
        ((0.5, 0.5, 0.0), {"algorithm.overlong_buffer": 2, "rollout.max_new_tokens": 4}),  # saved as it was trained
        ((100.1, 1.0, 100.1), {"reward.function": f"{function}:reward"}),  # saved in float32
    ):
        kept = [record | {"score": float(np.float32(score))} for record, score in zip(asked, scores, strict=True)]
        (folder / "rank_0.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
        code, out, err = tried(capsys, str(run), *(f"--set={key}={value}" for key, value in changed.items()))
        assert code == 0 and "1 of 3 differ from the score in the run" in out, (out, err)
    code, _, err = tried(capsys, str(run), "--set", "environment.function=tools")
    assert code == 2 and "episodes of environment.function 'tools'" in err
    prompts.write_text("".join(reversed(prompts.read_text().splitlines(keepends=True))))
    code, out, err = tried(capsys, str(run))  # scores of other rows would look like those of another reward
    assert code == 2 and "prompt 1 of data.train is not the one that step_2/0 answers" in err
