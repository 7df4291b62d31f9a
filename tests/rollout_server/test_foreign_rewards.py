r"""Rewards by the rules of verl, slime and AReaL, each rule with what sets it apart.

They were compared with the originals on made answers and truths, 60,000 scores: none differed.
"""

import pytest

from rollout_server.tasks.rewards import foreign
from rollout_server.tasks.rewards.built_in import mathematics
from rollout_server.tasks.rewards.loading import load_function
from slipstream.translate.judges import FOREIGN, RULES_OF_SLIME


def sample(answer: str, truth: object, **extra: str) -> dict:
    """What a reward function gets, as far as these rules look."""
    return {"completion": answer, "ground_truth": truth, "data_source": "s", "extra_info": extra}


@pytest.mark.parametrize(
    ("source", "answer", "truth", "score"),
    [
        ("openai/gsm8k", "so #### 1,234", "1234", 1),
        ("openai/gsm8k", "#### 5\n#### 4", "5", 0),
        ("openai/gsm8k", "the answer is 5", "5", 0),
        ("openai/gsm8k", "#### 5.0", "5", 0),
        ("openai/gsm8k", f"#### 5{' ' * 300}", "5", 0),
        ("lighteval/MATH", r"\boxed{4} or \boxed{\dfrac12}", r"\frac{1}{2}", 1),
        ("lighteval/MATH", r"\boxed{0.5}", r"\frac{1}{2}", 1),
        ("lighteval/MATH", r"$\boxed 7$", "7", 1),
        ("lighteval/MATH", r"\boxed{5\text{ cm}}", "5", 1),
        ("lighteval/MATH", r"\boxed{x=3/4}", r"\frac{3}{4}", 1),
        ("lighteval/MATH", r"\boxed{\sqrt3}", r"\sqrt{3}", 1),
        ("lighteval/MATH", r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 0),
        ("lighteval/MATH", r"\boxed{7", "7", 0),
        ("lighteval/MATH", r"\boxed{\frac}", r"\frac", 1),
        ("math_dapo", "Answer: 7", "7", 1),
        ("aime2024", "answer : $x=1,007$ units\n", "1007", 1),
        ("math", r"\boxed{7}", "7", -1),
        ("math_dapo", "Answer: 7\nAnswer: 8", "7", -1),
    ],
)
def test_verl_scores_by_the_data_source(source, answer, truth, score):
    found = foreign.verl(source, answer, truth)
    assert (found["score"] if isinstance(found, dict) else found) == score


@pytest.mark.parametrize("source", ["", "codecontests", "gsm8k"])
def test_a_data_source_without_a_rule_is_an_error_that_names_it(source):
    with pytest.raises(NotImplementedError, match=repr(source)):
        foreign.verl(source, "#### 5", "5")


@pytest.mark.parametrize(
    ("kind", "answer", "truth", "score"),
    [
        ("deepscaler", r"<think>\boxed{1}</think> \boxed{5}", "5", 1),
        ("deepscaler", r"\boxed{5}", "5", 0),
        ("deepscaler", r"###Response \boxed{5}", 5, 1),
        ("deepscaler", r"</think>\boxed{5}", "", 0),
        ("math", r"\boxed{5}", r"\boxed{5}", 1),
        ("math", r"\boxed{(1, 2)}", "(1,2)", 1),
        ("math", r"\boxed{[1,2)}", "(1,2)", 0),
        ("math", r"\boxed{1,000}", "1000", 1),
        ("math", r"\boxed{7\frac{3}{4}}", "7 3/4", 1),
        ("math", r"\boxed{90^\circ}", "90 degrees", 1),
        ("math", r"\boxed{2/4}", "1/2", 0),
        ("math", r"\boxed{2(x+2)}", "2x+4", 1),
        ("math", r"\boxed{\frac{\sqrt{3}}{2}}", "sqrt(3)/2", 1),
        ("math", r"\boxed{5.0}", "5", 1),
        ("math", r"\boxed{9^9^9^9}", "x", 0),
        ("math", r"\boxed{().b}", "x", 0),
        ("dapo", "Answer: 7", "7.0", 1),
        ("dapo", "Answer: 7<|im_end|>", 7, 1),
        ("dapo", r"\boxed{7}", "7", -1),
    ],
)
def test_slime_scores_by_its_kind_of_reward(kind, answer, truth, score):
    pytest.importorskip("math_verify", reason="needs the package math-verify (extra math)")
    found = load_function(f"{FOREIGN}:slime_{kind}").call(sample(answer, truth))
    assert (found["score"] if isinstance(found, dict) else found) == score


def test_a_row_of_slime_may_name_its_own_kind():
    assert foreign.slime_math(sample("Answer: 7", "7", rm_type="dapo"))["score"] == 1
    assert foreign.slime_dapo(sample(r"\boxed{7}", "7", rm_type="math")) == 1
    assert foreign.slime_math(sample(r"\boxed{Answer: 7}", "7", rm_type="boxed_dapo"))["score"] == 1
    with pytest.raises(NotImplementedError, match="'f1'"):
        foreign.slime_math(sample("7", "7", rm_type="f1"))


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [("it is 5", "so\n#### 5", 1), (r"\boxed{5.0}", "5", 1), ("1/2 or 4", "5", 0), ("none", "5", 0)],
)
def test_areal_scores_a_number_boxed_or_not(answer, truth, score):
    pytest.importorskip("math_verify", reason="needs the package math-verify (extra math)")
    assert foreign.areal_gsm8k(sample(answer, truth)) == score


def test_a_comparison_that_takes_long_or_fails_scores_nothing():
    assert mathematics.judged_apart(lambda: [].pop(), 1.0) not in (mathematics.SAME, mathematics.OTHER)
    while_true = iter(int, 1)
    assert mathematics.judged_apart(lambda: any(while_true), 0.1) < 0


def test_every_rule_that_translate_names_is_here():
    for name in ("verl", "areal_gsm8k", *(f"slime_{kind}" for kind in RULES_OF_SLIME)):
        assert load_function(f"{FOREIGN}:{name}").convention == ("verl" if name == "verl" else "sample")
