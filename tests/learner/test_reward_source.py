"""Preflight of reward.function: parameters are read from the source, by the rules of the rollout servers."""

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.launch import reward_source
from learner.launch.reward_source import problem_with_reward, problem_with_signature
from rollout_server.rewards import RewardError, loading

NAMES = ["sample", "prompts", "completions", "completion_ids", "data_source", "solution_str", "ground_truth", "x"]


def is_accepted(source: str) -> bool:
    namespace: dict[str, object] = {}
    exec(source, namespace)
    try:
        loading.adapt(namespace["f"], "f")  # type: ignore[arg-type]
    except RewardError:
        return False
    return True


@st.composite
def functions(draw: st.DrawFn) -> str:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=5))
    split = draw(st.integers(0, len(names)))
    defaults = draw(st.integers(0, split))
    positional = [f"{name}=None" if index >= defaults else name for index, name in enumerate(names[:split])]
    only = [f"{name}=None" if draw(st.booleans()) else name for name in names[split:]]
    parts = [*positional, *(["*", *only] if only else []), *(["**more"] if draw(st.booleans()) else [])]
    return f"{'async ' if draw(st.booleans()) else ''}def f({', '.join(parts)}):\n    return 1.0\n"


@given(functions())
@settings(max_examples=300, deadline=None)
def test_parameters_are_refused_that_the_rollout_servers_refuse(source):
    assert (problem_with_signature(ast.parse(source), "f") is None) == is_accepted(source)


def test_the_names_of_the_conventions_are_those_of_the_rollout_server():
    assert reward_source.VERL_NAMES == loading.VERL_NAMES and reward_source.SIGNATURES == loading.SIGNATURES


@pytest.mark.parametrize(
    "source",
    [
        "import functools\n\n@functools.cache\ndef reward(a, b):\n    return 1.0\n",
        "def reward(a, b):\n    return 1.0\n\nreward = reward\n",
        "from elsewhere import reward\n",
        "if True:\n    def reward(a, b):\n        return 1.0\n",
    ],
)
def test_what_the_source_does_not_decide_is_left_to_the_rollout_servers(tmp_path, source):
    (tmp_path / "mine.py").write_text(source)
    assert problem_with_reward(f"{tmp_path}/mine.py:reward") is None


def test_unknown_parameters_are_refused_in_files_and_in_modules(tmp_path, monkeypatch):
    folder = tmp_path / "graders_of_this_test"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "maths.py").write_text("def reward(answer, truth):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for spec in (f"{folder}/maths.py:reward", "graders_of_this_test.maths:reward"):
        said = problem_with_reward(spec)
        assert said is not None and "has the parameters (answer, truth); take `async def reward(sample)`" in said
    assert problem_with_reward("graders_of_this_test.others:reward") is None
