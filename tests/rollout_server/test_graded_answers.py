"""The rewards for numbers and mathematics on answers graded by hand, hostile ones included, and on huge ones."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rollout_server.tasks.rewards.built_in.mathematics import reward as mathematics
from rollout_server.tasks.rewards.built_in.numeric import reward as numeric
from tests.rollout_server.reward_runs import sample

CASES = [
    json.loads(line)
    for line in Path(__file__).with_name("graded_answers.jsonl").read_text(encoding="utf-8").splitlines()
]
REWARDS = {"math": mathematics, "numeric": numeric}


def graded(case: dict[str, Any]) -> float:
    return REWARDS[case["reward"]](sample(case["answer"], case["truth"]))["score"]


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_answers_are_graded_as_by_hand(name: str) -> None:
    if name == "math":
        pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    cases = [case for case in CASES if case["reward"] == name]
    counts = Counter(case["score"] for case in cases)
    assert len(cases) > 100 and min(counts.values()) > 30, counts
    wrong = [(case["truth"], case["answer"], case["score"]) for case in cases if graded(case) != case["score"]]
    assert wrong == []


def test_what_takes_too_long_scores_nothing_and_is_counted() -> None:
    pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    start = time.monotonic()
    found = mathematics(sample(r"\boxed{" + "(" * 150 + "5" + ")" * 150 + "}", "5"), seconds=0.3)
    assert found == {"score": 0.0, "has_answer": 1.0, "gave_up": 1.0}
    assert time.monotonic() - start < 5.0, "it would take minutes"
    for huge in ("9^{9^{9^9}}", "10**10**10", "9^{99999999}", "99999!", "((9!)!)!"):
        assert mathematics(sample(rf"\boxed{{{huge}}}", "5"), seconds=60.0)["gave_up"] == 1.0


def test_without_a_box_the_end_of_the_answer_counts_where_that_is_wanted() -> None:
    pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    texts = {
        r"so $x^2$, hence $\frac{2}{4}$.": 1.0,
        "#### 0.5": 1.0,
        "It is 1 and then 0.5": 1.0,
        "It is 0.6 or so": 0.0,
    }
    for text, score in texts.items():
        assert mathematics(sample(text, "1/2"), boxed=False)["score"] == score, text
        assert mathematics(sample(text, "1/2"))["has_answer"] == 0.0, text


def test_a_tolerance_is_relative_above_one_and_exact() -> None:
    near = {
        ("100", "101", 0.01): 1.0,
        ("100", "101.0001", 0.01): 0.0,
        ("0.1", "0.11", 0.01): 1.0,
        ("0", "0.02", 0.01): 0.0,
    }
    for (truth, text, tolerance), score in near.items():
        assert numeric(sample(text, truth), tolerance)["score"] == score, (truth, text)


def test_rows_without_a_usable_truth_are_errors() -> None:
    pytest.importorskip("math_verify", reason="the extra 'math' is not installed")
    for truth in (None, True, ["5"], "  "):
        with pytest.raises(ValueError, match="ground_truth is"):
            mathematics(sample(r"\boxed{5}", truth))
