"""Rewards of several parts: the sum, each part's score in the metrics, options, and what one part does to the sum."""

import math
from pathlib import Path
from typing import Any

import pytest

from rollout_server.tasks.rewards import RewardError, RewardOutcome, added
from rollout_server.tasks.rewards.built_in.texts import form, length, pattern
from rollout_server.tasks.rewards.loading import adapt
from tests.rollout_server.reward_runs import sample, score

OWN = """
def verl(data_source, solution_str, ground_truth, extra_info=None, scale=1.0):
    if solution_str == "raise":
        raise ValueError("of verl")
    return {"score": scale * len(solution_str), "chars": len(solution_str)}

def trl(completions, bonus=0.0, **columns):
    return [None if text == "none" else bonus + 0.25 for text in completions]

async def later(sample):
    return float("nan") if sample["completion"] == "nan" else 1.0

def short(completions):
    return [1.0]
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


def test_a_sum_has_each_part_in_its_metrics(own: str) -> None:
    reward: Any = {
        "exact": 1,
        "length": {"weight": 0.5, "max_tokens": 2, "buffer": 2},
        f"{own}:verl": {"weight": 0.1, "scale": 2.0},
    }
    (outcome,) = score(reward, "42")
    seconds = {name: value for name, value in outcome.metrics.items() if name.endswith("/seconds")}
    assert outcome.score == pytest.approx(1.0 + 0.5 * -0.5 + 0.1 * 4.0) and len(seconds) == 3
    rest = {name: value for name, value in outcome.metrics.items() if name not in seconds}
    assert rest == {"exact": 1.0, "length": -0.5, "own.verl": 4.0, "own.verl/chars": 2.0}


def test_a_part_alone_keeps_its_metrics_and_may_have_a_weight(own: str) -> None:
    (plain,) = score("numeric", "42")
    (weighted,) = score({"numeric": {"weight": 3, "tolerance": 0.5}}, "42.2")
    assert (plain.score, plain.metrics) == (1.0, {"has_number": 1.0})
    assert (weighted.score, weighted.metrics) == (3.0, {"has_number": 1.0})


@pytest.mark.parametrize("others", [["verl"], ["verl", "trl"], ["verl", "trl", "later"], ["verl", "later"]])
def test_a_part_without_a_score_fails_that_sample_alone(own: str, others: list[str]) -> None:
    reward: Any = {f"{own}:{name}": 1 for name in others}
    good, bad = score(reward, "ab", "raise")
    assert good.error is None and good.score == 2.0 + 0.25 * ("trl" in others) + 1.0 * ("later" in others)
    assert math.isnan(bad.score) and bad.metrics == {}
    assert "ValueError: of verl" in str(bad.error) and "own.py:4" in str(bad.error)


def test_errors_of_parts_name_them(own: str) -> None:
    (nan,) = score({f"{own}:later": 1, "exact": 1}, "nan")
    assert "own.later returned nan" in str(nan.error)
    (few, _) = score({f"{own}:short": 1, "exact": 1}, "a", "b")
    assert "own.short must return a list of 2 numbers, found 1 of them" in str(few.error)


def test_none_of_a_trl_part_adds_nothing_and_is_counted(own: str) -> None:
    reward: Any = {f"{own}:trl": {"bonus": 1.0}, "exact": 1}
    applies, not_applicable = score(reward, "42", "none")
    assert (applies.score, not_applicable.score) == (2.25, 0.0)
    assert not_applicable.metrics["own.trl/not_applicable"] == 1.0 and "own.trl/not_applicable" in applies.metrics


def test_options_reach_functions_of_every_convention_and_unknown_ones_are_refused(own: str) -> None:
    with pytest.raises(RewardError, match=r"takes no option 'scael'; it has \(data_source"):
        score({f"{own}:verl": {"scael": 2}}, "x")

    def open_ended(completions: list[str], **columns: Any) -> list[float]:
        return [float(columns["level"])] * len(completions)

    function = adapt(open_ended, "f", {"level": 9})
    assert function.call([sample()]) == [9.0], "an option counts, whatever columns the rows have"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>\na\n</think>\n<answer>b</answer>\n", 1.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think> </think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>x<answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>.", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_format(text: str, expected: float) -> None:
    assert form(sample(text), ("think", "answer")) == expected
    assert form(sample(text.partition("<think>")[2]), ("think", "answer"), opened=True) == expected


def test_length_costs_past_its_ends() -> None:
    costs = {n: length(sample(num_tokens=n), max_tokens=10, min_tokens=4, buffer=5) for n in (0, 2, 4, 10, 11, 15, 99)}
    assert costs == {0: -1.0, 2: -0.5, 4: 0.0, 10: 0.0, 11: -0.2, 15: -1.0, 99: -1.0}
    assert length(sample(num_tokens=11), max_tokens=10) == -1.0


def test_regex_finds_or_compares_and_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pattern(sample("x 42 y"), r"\d+")["score"] == 1.0
    assert pattern(sample("x 42 y"), r"\d+", whole=True)["score"] == 0.0
    assert pattern(sample("is 41, no: 42."), r"(?P<answer>\d+)\.?")["score"] == 1.0
    assert pattern(sample("is 42, no: 41."), r"(?P<answer>\d+)\.?")["score"] == 0.0
    with pytest.raises(ValueError, match="ground_truth is None"):
        pattern(sample("1", None), r"(?P<answer>\d+)")
    monkeypatch.setattr("rollout_server.tasks.rewards.built_in.texts.TIMEOUT_S", 0.1)
    assert pattern(sample("a" * 5000), r"(a|aa)+$(?<!a)") == {"score": 0.0, "gave_up": 1.0}


def test_a_sum_that_is_no_finite_number_is_an_error() -> None:
    outcome = added([RewardOutcome(score=1e308, seconds=0.0), RewardOutcome(score=1e308, seconds=0.0)])
    assert math.isnan(outcome.score) and outcome.error == "the sum of the parts is inf"
