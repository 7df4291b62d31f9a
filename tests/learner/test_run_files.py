"""Files of a run: the ledger, evaluations beside what was asked, rollouts with every digit of their logprobs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from learner.record import evaluation, rollouts
from learner.record.ledger import FILE, Ledger, read
from replay.data import DataError
from replay.messages import EvaluationResult
from slipstream.runtime.disk import Disk
from tests.learner.recorded import batch_of, random_step, rows_of
from tests.learner.tiny_models import make_config

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
    (only,) = config.evaluation_sets
    return evaluation.evaluation_rows(config)[""], only


def test_every_data_source_has_its_own_metrics(rows):
    scores = {"val-core/sums/greedy": 0.5, "val-core/parity/greedy": 0.25}
    scores |= {f"val-aux/{source}/greedy/response_length": 2.0 for source in ("sums", "parity")}
    scores |= {f"val-aux/{source}/greedy/seconds": 1.5 for source in ("sums", "parity")}
    scores |= {"val-aux/sums/greedy/clip_ratio": 0.5, "val-aux/parity/greedy/clip_ratio": 0.0}
    scores |= {"val-aux/sums/greedy/pass@1": 0.5, "val-aux/parity/greedy/pass@1": 0.0}
    assert evaluation.values(RESULT, *rows) == scores


def test_an_answer_stands_beside_what_was_asked(rows, tmp_path):
    rows, _ = rows
    path = evaluation.write_rows(str(tmp_path), RESULT, rows, Disk())
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "version_3_greedy.jsonl" and not {"set", "sample"} & written[0].keys()
    assert [row["prompt"] for row in written] == [row["prompt"] for row in ROWS[:3]]
    found = [(row["ground_truth"], row["text"], row["reward"]) for row in written]
    assert found == [("2", "2", 1.0), ("odd", "even", 0.25), ("4", "5", 0.0)]
    with pytest.raises(DataError, match=r"version 3: 3 answers, data\.eval has 2 rows now"):
        evaluation.write_rows(str(tmp_path), RESULT, rows[:2], Disk())


def letters(token_ids, **_settings):
    """Of a tokenizer with one letter a token."""
    return "".join(chr(65 + token) for token in token_ids)


def test_a_step_that_is_made_again_on_fewer_ranks_is_saved_once(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "load_tokenizer", lambda folder: SimpleNamespace(decode=letters))
    saved: dict[int, list[str]] = {}
    for ranks in (2, 1):
        sections = {"tracking": {"save_rollouts_every": 1}, "placement": {"split": f"1:{ranks}"}}
        config = make_config(tmp_path, run={"dir": str(tmp_path), "name": "run"}, **sections)
        for rank in reversed(range(ranks)):
            batch = batch_of(random_step(3), 3, rank=rank, world_size=ranks)
            rollouts.RolloutWriter(config).write_if_due(batch, np.zeros(len(batch.all_rewards), np.float32))
        folder = tmp_path / "run" / "rollouts" / "step_3"
        saved[ranks] = [line for file in folder.iterdir() for line in file.read_text().splitlines()]
    assert sorted(saved[1]) == sorted(saved[2]) and len(set(saved[1])) == len(saved[1])


def test_a_saved_trajectory_has_the_trainers_logprob_of_each_trained_token(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "load_tokenizer", lambda folder: SimpleNamespace(decode=letters))
    config = make_config(tmp_path, run={"dir": str(tmp_path), "name": "run"}, tracking={"save_rollouts_every": 1})
    writer = rollouts.RolloutWriter(config)
    trajectories = random_step(3)
    batch = batch_of(trajectories, 3, num_microbatches=3)
    rows, _ = rows_of(batch, config)
    objective = writer.watch(lambda row, logprobs, entropy: (logprobs.sum(), {}))
    writer.begin(3)
    for row in rows:
        objective(row, row.behaviour_logprobs + 0.5, row.behaviour_logprobs)
    advantages = np.zeros(len(batch.all_rewards), np.float32)
    writer.write_if_due(batch, advantages)
    lines = (tmp_path / "run" / "rollouts" / "step_3" / "rank_0.jsonl").read_text().splitlines()
    trained = 0
    for line, given in zip(map(json.loads, lines), trajectories, strict=True):
        assert line["prompt_ids"] == given.prompt_ids and line["logprobs"] == given.logprobs
        assert line["versions"] == given.versions and line["score"] == given.reward
        assert (line["prompt"], line["text"]) == (letters(given.prompt_ids), letters(given.response_ids))
        has_row = line["trajectory"] in {int(i) for row in rows for i in row.trajectories}
        wanted = [
            pytest.approx(logprob + 0.5, abs=1e-6) if has_row and in_loss else None
            for logprob, in_loss in zip(line["logprobs"], line["loss_mask"], strict=True)
        ]
        assert line["trainer_logprobs"] == wanted
        assert line["tokens"] == [letters([token]) for token in line["response_ids"]]
        trained += has_row
    assert 0 < trained < len(lines)  # group 0 has no advantage, so no row has it


OF_STEP: dict[str, Any] = {"incarnation": 1, "digest": "d", "expected": ""}


def test_a_group_that_is_trained_again_is_counted(tmp_path):
    ledger = Ledger(tmp_path, resume_version=None)
    assert ledger.append(1, [[0, 1], [0, 2]], **OF_STEP) == 0
    assert ledger.append(2, [[0, 3], [1, 1]], **OF_STEP) == 0
    assert ledger.append(3, [[0, 2], [0, 4]], **OF_STEP) == 1
    assert [line["step"] for line in read(tmp_path)] == [1, 2, 3] and "expected" not in read(tmp_path)[0]


def test_a_resume_that_is_killed_leaves_the_ledger(tmp_path, monkeypatch):
    Ledger(tmp_path, resume_version=None).append(1, [[0, 1]], **OF_STEP)
    monkeypatch.setattr(Path, "write_text", lambda path, *_, **__: path.open("w").close())  # as far as the kill lets it
    for _ in range(2):
        Ledger(tmp_path, resume_version=1)
    assert [line["step"] for line in read(tmp_path)] == [1]


def test_steps_after_the_checkpoint_may_be_made_again_and_no_others(tmp_path):
    ledger = Ledger(tmp_path, resume_version=None)
    for step in (1, 2, 3):
        ledger.append(step, [[0, step]], **OF_STEP)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 4, "gro')  # killed while writing
    resumed = Ledger(tmp_path, resume_version=2)
    assert resumed.append(3, [[0, 3]], incarnation=2, digest="d", expected="d") == 0
    assert resumed.append(4, [[0, 1]], **OF_STEP) == 1
    assert [(line["step"], line.get("expected")) for line in read(tmp_path)][2:] == [(3, None), (3, "d"), (4, None)]
