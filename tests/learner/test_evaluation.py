"""Evaluations on the learner's side: pass@k, names of metrics, and that nothing counts before it is whole."""

import itertools
import json
from dataclasses import replace
from fractions import Fraction
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.record import evaluation
from learner.record.evaluation import Evaluations, pass_at
from learner.record.metrics import evaluation_scores
from learner.record.summary import curves, evaluations, summarize
from replay.data import DataError
from replay.messages import EvaluationResult
from slipstream.view import live_text
from tests.learner.tiny_models import make_config

AIME = [{"prompt": f"{i}+1=", "answer": str(i), "data_source": "math"} for i in range(3)]


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=3), st.integers(1, 6))
def test_pass_at_k_is_the_mean_over_all_ways_to_draw_k_answers(answers, k):
    """Exact enumeration: of all sets of k of the n answers, the share that holds a right one."""
    n = 6
    draws = list(itertools.combinations(range(n), k))
    shares = [Fraction(sum(any(prompt[i] for i in draw) for draw in draws), len(draws)) for prompt in answers]
    assert pass_at(k, n, [sum(prompt) for prompt in answers]) == pytest.approx(
        float(sum(shares) / len(shares)), abs=1e-12
    )


def test_pass_at_k_of_many_answers_stays_exact():
    assert pass_at(1000, 2000, [1]) == 0.5 and pass_at(1, 2000, [0, 2000, 1000]) == 0.5 and pass_at(3, 4, [2]) == 1.0


@pytest.fixture
def config(tmp_path):
    """Two sets: `aime` with four answers to each of 3 prompts and a greedy one, `easy` greedy alone."""
    file = tmp_path / "aime.jsonl"
    file.write_text("".join(json.dumps(row | {"tools": [{}]}) + "\n" for row in AIME))
    sets = {"aime": {"path": str(file), "samples": 4, "solved_at": 0.9}, "easy": {"path": str(file), "sampled": False}}
    run = {"dir": str(tmp_path), "name": "run"}
    return make_config(tmp_path, data={"eval": sets}, evaluation={"every_steps": 1}, run=run)


def part(name: str, rewards: list[list[float]], *, first: int = 0, greedy: bool = False, version: int = 3) -> Any:
    """Answers to the prompts from `first` on, one list of rewards for each."""
    flat = [reward for of_prompt in rewards for reward in of_prompt]
    return EvaluationResult(
        version=version,
        set=name,
        greedy=greedy,
        first=first,
        samples=len(rewards[0]),
        seconds=2.0 + first,
        texts=[f"{first}:{i}" for i in range(len(flat))],
        finish_reasons=["length" if reward == 0 else "stop" for reward in flat],
        rewards=np.array(flat, np.float32),
        lengths=np.arange(1, len(flat) + 1, dtype=np.int32),
    )


REWARDS = [[1.0, 0.0, 0.9, 0.0], [0.5, 0.5, 0.5, 0.5], [1.0, 1.0, 1.0, 1.0]]


def test_answers_that_failed_are_out_of_the_score_and_named(config, caplog):
    marks = np.zeros(12, np.uint8)
    marks[0] = 1
    errors = ["reward_error" if mark else "" for mark in marks]
    failed = replace(part("aime", REWARDS), errors=errors, left_out=marks, error_detail="KeyError: 'x'")
    collected = Evaluations(config)
    ((_, _, numbers),) = collected.news([failed], {})
    rest = [0.0, 0.9, 0.0, *REWARDS[1], *REWARDS[2]]
    assert numbers["val-core/aime/reward/mean@4"] == pytest.approx(fmean(rest))
    assert numbers["val-core/aime/reward/pass@4"] == 0.5, "of the prompts with four scored answers"
    assert numbers["val-aux/aime/sampled/not_scored"] == 1.0
    assert "11 of 12 answers scored, 1 reward_error: KeyError: 'x'" in caplog.text
    rows = evaluation.file_of(config.run_dir, 3, "aime", greedy=False).read_text().splitlines()
    assert (json.loads(rows[0])["reward"], json.loads(rows[0])["error"]) == (None, "reward_error")
    assert "error" not in json.loads(rows[1]) and json.loads(rows[1])["tools"] == [{}]


def test_an_evaluation_with_too_many_failures_is_void(config, caplog):
    marks = np.array([1] * 3 + [0] * 9, np.uint8)
    errors = ["environment_error" if mark else "" for mark in marks]
    void = replace(part("aime", REWARDS), errors=errors, left_out=marks, error_detail="x")
    ((_, _, numbers),) = Evaluations(config).news([void], {})
    assert numbers == {"val-aux/aime/sampled/given_up": 1.0} and "void" in caplog.text


def test_prompts_that_cannot_be_asked_do_not_void_an_evaluation(config, caplog):
    """They have no answer: neither their share nor their length counts against the others."""
    marks = np.array([1] * 8 + [0] * 4, np.uint8)
    errors = ["prompt_too_long"] * 4 + ["prompt_not_rendered"] * 4 + [""] * 4
    lengths = np.array([0] * 8 + [6] * 4, np.int32)
    answers = part("aime", [*REWARDS[:2], [0.0, 0.0, 1.0, 1.0]])
    reasons = ["stop"] * 8 + answers.finish_reasons[8:]
    short = replace(
        answers, errors=errors, left_out=marks, lengths=lengths, finish_reasons=reasons, error_detail="99 tokens"
    )
    ((_, _, numbers),) = Evaluations(config).news([short], {})
    assert numbers["val-core/aime/reward/mean@4"] == 0.5 and numbers["val-aux/aime/sampled/not_scored"] == 8.0
    assert numbers["val-aux/aime/sampled/response_length"] == 6.0
    assert numbers["val-aux/aime/sampled/clip_ratio"] == 0.5
    assert "4 of 12 answers scored, 4 prompt_not_rendered, 4 prompt_too_long: 99 tokens" in caplog.text


def test_a_set_is_measured_under_its_name_once_all_its_parts_are_there(config):
    collected = Evaluations(config)
    assert list(collected.news([part("aime", REWARDS[2:], first=2)], {})) == []
    ((version, name, numbers),) = collected.news([part("aime", REWARDS[:2])], {})
    assert (version, name) == (3, "aime")
    core = {name: value for name, value in numbers.items() if name.startswith("val-core/")}
    expected = {"mean@4": fmean(map(fmean, REWARDS)), "pass@1": (0.5 + 0 + 1) / 3, "pass@4": 2 / 3}
    assert core == {f"val-core/aime/reward/{name}": pytest.approx(value) for name, value in expected.items()}
    assert numbers["val-aux/aime/reward/pass@2"] == pytest.approx((1 - 1 / 6 + 0 + 1) / 3), "solved from .9 on"
    assert numbers["val-aux/aime/sampled/clip_ratio"] == pytest.approx(2 / 12)
    assert numbers["val-aux/aime/sampled/seconds"] == 4.0
    lines = evaluation.file_of(config.run_dir, 3, "aime", greedy=False).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["set"], row["index"], row["sample"]) for row in rows] == [("aime", i // 4, i % 4) for i in range(12)]
    assert [row["reward"] for row in rows[:4]] == pytest.approx(REWARDS[0]) and rows[8]["text"] == "2:0"
    late = [list(numbers) for _, _, numbers in collected.news([part("aime", REWARDS)], {3: "late"})]
    assert late == [[f"val-aux/{name}/greedy/given_up"] for name in ("aime", "easy")], "what was whole stays"


def test_what_is_given_up_is_named_per_set_and_never_measured(config, caplog):
    collected = Evaluations(config)
    came = [part("aime", REWARDS[:2]), part("easy", [[1.0], [0.0], [0.0]], greedy=True), part("gone", [[1.0]])]
    news = list(collected.news(came, {3: "not done within 5 s (at rollout-0)"}))
    assert news[0][:2] == (3, "easy") and news[0][2]["val-core/easy/greedy"] == pytest.approx(1 / 3)
    assert news[1:] == [
        (3, "aime", {"val-aux/aime/greedy/given_up": 1.0}),
        (3, "aime", {"val-aux/aime/sampled/given_up": 1.0}),
    ]
    said = "given up: data.eval.aime, sampled, with 2 of 3 prompts: not done within 5 s (at rollout-0)"
    assert said in caplog.text
    assert not evaluation.file_of(config.run_dir, 3, "aime", greedy=False).exists()
    assert list(collected.news([part("aime", REWARDS[2:], first=2)], {3: "again"})) == []


def test_a_file_that_was_changed_during_the_run_is_named(config):
    collected = Evaluations(config)
    for rewards in (REWARDS[:2], [*REWARDS, *REWARDS]):
        with pytest.raises(DataError, match=r"answers, data\.eval\.aime has 3 rows now; do not change the file"):
            list(Evaluations(config).news([part("aime", rewards)], {3: ""}))
    assert not list(collected.news([], {}))


ROWS: list[dict[str, Any]] = [
    {"version": 0, "set": "aime", "val-core/aime/reward/mean@4": 0.1, "val-core/aime/reward/pass@4": 0.3},
    {"version": 0, "set": "easy", "val-core/easy/sampled": 0.5},
    {"version": 5, "set": "aime", "val-core/aime/reward/mean@4": 0.2, "val-core/aime/reward/pass@4": 0.4},
    {"version": 5, "set": "easy", "val-aux/easy/sampled/given_up": 1.0},
    {"version": 10, "set": "easy", "val-core/easy/sampled": 0.7},
    {"version": 10, "set": "aime", "val-core/aime/reward/mean@4": 0.5, "val-core/aime/reward/pass@4": 0.8},
]


def test_readers_know_sets_apart(tmp_path):
    assert evaluation_scores(ROWS[0]) == {"aime/mean@4": 0.1, "aime/pass@4": 0.3}
    assert evaluation_scores(ROWS[3]) == {"easy/sampled": None}
    assert evaluations(ROWS, "sampled") == [(0, pytest.approx(0.3)), (10, pytest.approx(0.6))], "5 has not all sets"
    assert evaluations(ROWS, "sampled", "aime") == [(0, 0.1), (5, 0.2), (10, 0.5)]
    assert evaluations(ROWS, "greedy", "aime") == []
    old = [{"version": v, "val-core/s/greedy": v / 10, "val-core/t/greedy": v / 20} for v in (0, 5)]
    assert evaluations(old, "greedy", "t") == [(0, 0.0), (5, 0.25)] and evaluations(old, "greedy")[1] == (5, 0.375)
    assert curves(ROWS)["aime/mean@4"] == ([0, 5, 10], [0.1, 0.2, 0.5])
    assert live_text.evaluation_line(ROWS[0]) == "evaluation of version 0  aime/mean@4 0.10  aime/pass@4 0.30"
    assert live_text.evaluation_line(ROWS[3]) == "evaluation of version 5  easy/sampled –"
    step = {"step": 1, "response_length/mean": 7.0, "timing_s/step": 1.0, "training/lag_histogram": {"0": 1}}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, step]))
    assert summarize(tmp_path, None)["sets"]["aime/pass@4"] == [0.3, 0.8]
