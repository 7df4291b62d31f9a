"""Reward functions: the built-in ones, user code and its signatures, its results, and what a pool believes of them."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_server.tasks.rewards import RewardError, Sample
from rollout_server.tasks.rewards.built_in.numeric import final_number
from rollout_server.tasks.rewards.built_in.numeric import reward as numeric
from rollout_server.tasks.rewards.built_in.texts import exact
from rollout_server.tasks.rewards.loading import adapt, load_function
from rollout_server.tasks.rewards.process import REPLY_LIMITS, Call, read_answer, read_reply
from rollout_server.tasks.rewards.worker import CompositeReward, NotAReward, Verdict, WeightedReward, reward_of
from rollout_server.tasks.workers.frames import pack, unpack
from tests.rollout_server.reward_runs import sample
from tests.support.runs import ROOT


def test_a_neighbour_of_a_reward_file_hides_no_package_of_ours(tmp_path: Path) -> None:
    """scripts/bench/learner.py once did. In a process of its own: here everything is imported already."""
    for name in ("configs", "learner", "replay"):
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    file = tmp_path / "graded.py"
    imports = "import configs.machine, learner.record.ledger, slipstream.runtime.fingerprint\n"
    file.write_text(imports + "async def reward(sample):\n    return 1.0\n", encoding="utf-8")
    load = "import sys; from rollout_server.tasks.rewards.loading import load_function; load_function(sys.argv[1])"
    subprocess.run([sys.executable, "-c", load, f"{file}:reward"], check=True, timeout=150, cwd=ROOT)


def judged(function: Callable[..., Any], samples: list[Sample]) -> list[Verdict]:
    return CompositeReward([WeightedReward("", 1.0, adapt(function, "f"))]).judge_now(samples)


def test_exact_is_to_the_letter() -> None:
    assert exact(sample()) == 1.0
    assert exact(sample(truth=42)) == 1.0
    assert exact(sample("42 ")) == exact(sample("4")) == exact(sample(finish_reason="length")) == 0.0
    for truth in (None, ["42"], True):
        with pytest.raises(ValueError, match="ground_truth is"):
            exact(sample(truth=truth))


def test_numeric_compares_numbers_not_text() -> None:
    assert numeric(sample("#### 1,234.0", "1234")) == {"score": 1.0, "has_number": 1.0}
    assert numeric(sample("0.1", 0.1))["score"] == 1.0
    assert numeric(sample("0.30000000000000004", "0.3"))["score"] == 0.0
    assert numeric(sample("none", "0")) == {"score": 0.0, "has_number": 0.0}
    assert numeric(sample("#### 5", "so it is\n#### 5"))["score"] == 1.0
    for truth in ("none", None, [1], True, "2\\sqrt{3}", "\\boxed{3\\pi}", "√3"):
        with pytest.raises(ValueError, match="is no number"):
            numeric(sample(truth=truth))


@pytest.mark.parametrize(
    "text",
    [
        "1" + ",111" * 60_000 + "1",
        "1" * 300_000,
        "-" * 300_000,
        "\\boxed{" * 50_000,
        "\\frac{1" + " " * 200_000,
        "\\frac{1}{" * 30_000 + "2}",
        "$" * 200_000 + "1",
        "1/" * 100_000,
        "-$-" * 70_000,
        "1e" * 100_000,
        "#### " + " " * 200_000 + "7",
        "1" * 99 + "e99/" + "1" * 99,
        "." * 200_000 + "5",
    ],
)
def test_no_answer_buys_time(text: str) -> None:
    start = time.process_time()
    final_number(text)
    assert time.process_time() - start < 1.0


def test_verl_signature() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
        return {"score": float(solution_str == ground_truth), "index": extra_info["index"], "pred": solution_str}

    def wide(solution_str: str, **rest: Any) -> float:
        return float(rest == {"data_source": "sums", "ground_truth": "42", "extra_info": {"index": 3}})

    assert adapt(compute_score, "f").convention == "verl"
    assert [v[:3] for v in judged(compute_score, [sample(), sample("7")])] == [
        (1.0, {"index": 3.0}, None),
        (0.0, {"index": 3.0}, None),
    ]
    assert judged(lambda solution_str, ground_truth: solution_str == ground_truth, [sample()])[0][0] == 1.0
    assert judged(wide, [sample()])[0][0] == 1.0


def test_trl_signature_gets_the_whole_request_and_the_columns() -> None:
    seen: dict[str, Any] = {}

    def trl(prompts: list[Any], completions: list[Any], level: list[int], **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions, level=level)
        return [float(len(completion)) for completion in completions]

    assert [v[:2] for v in judged(trl, [sample("a"), sample("bb")])] == [(1.0, {}), (2.0, {})]
    assert seen["prompts"] == ["6*7=", "6*7="] and seen["completions"] == ["a", "bb"] and seen["level"] == [5, 5]
    assert seen["ground_truth"] == ["42", "42"] and seen["extra_info"] == [{"index": 3}] * 2
    chat = sample("abc", prompt=[{"role": "user", "content": "?"}])
    assert judged(lambda completions: [float(len(c[0]["content"])) for c in completions], [chat])[0][0] == 3.0
    own = sample(columns={"ground_truth": 9})
    assert judged(lambda completions, ground_truth: ground_truth, [own])[0][0] == 9.0, "the row's column wins"


def test_trl_results_are_checked_arrays_are_fine_and_none_does_not_apply_and_is_counted() -> None:
    for values, error in (([1.0], "list of 2 numbers, found 1"), (7, "found an int"), ([1.0, np.nan], "returned nan")):
        verdicts = judged(lambda completions, values=values: values, [sample(), sample()])
        assert error in str(verdicts[1][2]) and verdicts[1][0] is None
    assert [v[0] for v in judged(lambda completions: np.array([1, 0]), [sample()] * 2)] == [1.0, 0.0]
    assert [v[:3] for v in judged(lambda completions: [1.0, None, 0.5], [sample()] * 3)] == [
        (1.0, {"not_applicable": 0.0}, None),
        (0.0, {"not_applicable": 1.0}, None),
        (0.5, {"not_applicable": 0.0}, None),
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, (1.0, {})),
        (np.float32(0.5), (0.5, {})),
        (np.array([0.5]), (0.5, {})),
        (Fraction(1, 2), (0.5, {})),
        ({"score": 1, "acc": True, "text": "x", "none": None}, (1.0, {"acc": 1.0})),
        ({"reward": 0.5, "length": np.int64(3)}, (0.5, {"length": 3.0})),
        ({"score": 1.0, "reward": 0.0}, (1.0, {"reward": 0.0})),
    ],
)
def test_rewards_that_count(value: Any, expected: Any) -> None:
    assert reward_of(value) == expected


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (None, "returned None"),
        ("1.0", "'1.0', a str"),
        (float("nan"), "returned nan"),
        (float("-inf"), "returned -inf"),
        (10**400, "returned inf"),
        (np.zeros(2), "a ndarray"),
        ({}, "without 'score'"),
        ({"accuracy": 1.0}, "accuracy"),
        ({"score": None}, "score = None"),
        ({"score": 1.0, "loss": float("inf")}, "loss = inf"),
        ({"score": 1.0} | {f"m{i}": 0.0 for i in range(65)}, "65 metrics"),
    ],
)
def test_rewards_that_are_none_are_errors_never_zero(value: Any, named: str) -> None:
    with pytest.raises(NotAReward) as raised:
        reward_of(value)
    assert named in str(raised.value)
    ((score, metrics, error, _),) = judged(lambda sample: value, [sample()])
    assert score is None and metrics == {} and named in str(error)


def test_what_a_function_raises_names_type_message_and_place() -> None:
    for raised, named in ((KeyError("level9"), "KeyError: 'level9'"), (SystemExit(3), "SystemExit: 3")):

        def broken(sample: Sample, raised: BaseException = raised) -> float:
            raise raised

        ((score, _, error, _),) = judged(broken, [sample()])
        assert score is None and named in str(error) and "test_reward_functions.py:" in str(error)


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ("", "parameters ()"),
        ("a, b", "(a, b)"),
        ("*, sample", "(sample)"),
        ("solution_str, tokenizer", "'tokenizer'"),
        ("completions, completion_ids", "completion_ids"),
    ],
)
def test_other_signatures_are_refused(parameters: str, named: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def f({parameters}): return 1.0", namespace)
    with pytest.raises(RewardError) as raised:
        adapt(namespace["f"], "my:f")
    assert named in str(raised.value) and "'my:f'" in str(raised.value) and "compute_score" in str(raised.value)


def test_functions_are_found_in_files_and_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sibling.py").write_text("SCORE = 0.25\n")
    (tmp_path / "grader.py").write_text("from sibling import SCORE\ndef grade(sample): return SCORE\n_hidden = print\n")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert load_function(f"{tmp_path}/grader.py:grade").call(sample()) == 0.25
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_function("grader:grade").call(sample()) == 0.25
    assert load_function("exact").call(sample()) == 1.0
    assert load_function("numeric").call(sample())["score"] == 1.0


def test_wrong_names_come_with_a_suggestion(tmp_path: Path) -> None:
    for name, source in {
        "grader": "def grade(sample): return 1.0\n",
        "broken": "import nothing_of_that_name\n",
        "leaving": "raise SystemExit('bye')\n",
    }.items():
        (tmp_path / f"{name}.py").write_text(source)
    for spec, parts in {
        "exactt": ["'exactt'", "did you mean 'exact'?"],
        ":f": ["':f'", "names no function"],
        f"{tmp_path}/grader.py:grad": ["no function 'grad'", "did you mean 'grade'?"],
        f"{tmp_path}/grader.py:zzz": ["no function 'zzz'", "it has grade"],
        f"{tmp_path}/none.py:f": ["no file", str(Path.cwd())],
        f"{tmp_path}/broken.py:f": ["ModuleNotFoundError", "nothing_of_that_name", "broken.py:1"],
        f"{tmp_path}/leaving.py:f": ["SystemExit", "bye"],
        "no_such_package.rewards:f": ["no_such_package", "not installed"],
    }.items():
        with pytest.raises(RewardError) as raised:
            load_function(spec)
        assert [part for part in ["reward.function", *parts] if part not in str(raised.value)] == [], raised.value


def verdict(score: Any = 1.0, metrics: Any = None, error: Any = None, seconds: Any = 0.1) -> list[Any]:
    return [score, metrics or {}, error, seconds]


ASKED = {7: Call([sample()], []), 8: Call([sample()] * 2, [])}


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        ([7, [verdict(), verdict()]], "no list of verdicts that was asked for"),
        ([9, [verdict()]], "no list of verdicts that was asked for"),
        ([True, [verdict()]], "no list of verdicts that was asked for"),
        ([7, [verdict(float("nan"))]], "score nan"),
        ([7, [verdict(float("inf"))]], "score inf"),
        ([7, [verdict(2**63)]], "score 9223372036854775808"),
        ([7, [verdict(True)]], "score True"),
        ([7, [verdict("1.0")]], "score '1.0'"),
        ([7, [verdict(None)]], "score None with error None"),
        ([7, [verdict(1.0, error="and why not")]], "with error 'and why not'"),
        ([7, [verdict(1.0, {"a": [1.0]})]], "metric 'a' = [1.0]"),
        ([7, [verdict(1.0, {7: 1.0})]], "int is not allowed for map key"),
        ([7, [verdict(1.0, {str(i): 1.0 for i in range(65)})]], "exceeds max_map_len"),
        ([7, [verdict(seconds=-1.0)]], "seconds -1.0"),
        ([7, [verdict(msgpack.ExtType(5, b"xx"))]], "max_ext_len"),
        ([7, [verdict(None, error="x" * 500_000)]], "exceeds max_str_len"),
        ([7, [[1.0]]], "expected a verdict"),
        ({"verdicts": [verdict()]}, "no list of verdicts that was asked for"),
    ],
)
def test_replies_that_are_no_verdicts_are_refused(reply: Any, named: str) -> None:
    with pytest.raises(ValueError) as raised:
        read_reply(unpack(pack(reply)[4:], REPLY_LIMITS), ASKED)
    assert named in str(raised.value)


@pytest.mark.parametrize("body", [b"\xdd\x00\x00\x04\x01" * 1000, b"\xdd\xff\xff\xff\xff"])
def test_lengths_are_refused_before_memory_is_taken(body: bytes) -> None:
    with pytest.raises(ValueError, match="exceeds max_array_len"):
        unpack(body, REPLY_LIMITS)


@pytest.mark.parametrize("levels", [10, 1000, 100_000])
@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1k"])
def test_depth_costs_nothing(head: bytes, levels: int) -> None:
    for read, named in ((lambda reply: read_reply(reply, ASKED), "verdict"), (read_answer, "convention")):
        with pytest.raises(ValueError, match=f"{named}|deep|not msgpack"):
            read(unpack(head * levels + b"\xc0", REPLY_LIMITS))


data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150)
@given(
    st.binary(max_size=200)
    | st.tuples(st.sampled_from([*ASKED]), st.lists(st.lists(data, min_size=4, max_size=4), max_size=3)).map(pack)
)
def test_any_other_reply_raises_only_value_errors(body: bytes) -> None:
    with contextlib.suppress(ValueError):
        number, outcomes = read_reply(unpack(body[4:], REPLY_LIMITS), ASKED)
        assert len(outcomes) == len(ASKED[number].samples)
        assert all(one.error is not None or abs(one.score) < float("inf") for one in outcomes)
    with contextlib.suppress(ValueError):
        read_answer(unpack(body[4:], REPLY_LIMITS))
