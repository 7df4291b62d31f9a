"""Which teacher a row is for, what its prompt says besides, and what the policy gives to its own answers with that."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs import Config
from examples.random_qwen3 import make
from replay.scores import problem_with_scores
from rollout_server.generate import Generator
from rollout_server.tasks.failed import LeaseFailed
from rollout_server.tasks.task import Task
from rollout_server.teachers import TeacherError
from rollout_server.teachers.prompts import teacher_of, with_context
from rollout_server.teachers.scores import Teachers
from slipstream.runtime.fingerprint import model_fingerprint
from tests.rollout_server.small_generator import LengthJudge, lease_of
from tests.rollout_server.teacher_rig import ROW, config_of
from tests.rollout_server.torch_served import serving

TWO = {"sums": {"url": "http://h/v1", "model": "m", "rows": {"data_source": "sums"}}}
TWO |= {"hard": {"url": "http://h/v1", "model": "m", "rows": {"level": [3, 4]}}}
CONTEXT = "{prompt} w{{8}} {hint} {ground_truth}"


def scoring(**teachers: dict[str, Any]) -> Any:
    return config_of(Path("none"), **teachers).scoring


@pytest.mark.parametrize(
    ("changes", "name"),
    [({}, "sums"), ({"data_source": "x", "columns": {"level": 4}}, "hard"), ({"columns": {"level": 3}}, "sums")],
)
def test_a_row_goes_to_the_first_teacher_that_takes_it(changes: dict[str, Any], name: str) -> None:
    assert teacher_of(scoring(**TWO), ROW | changes) == name


def test_a_row_that_no_teacher_takes_is_named() -> None:
    with pytest.raises(
        TeacherError, match=r"none of sums, hard takes the row 'w5 w9' with data_source 'x', level None"
    ):
        teacher_of(scoring(**TWO), ROW | {"data_source": "x"})


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("w5", "w5 w{8} w8 w7"), (MESSAGES, [*MESSAGES[:2], {"role": "user", "content": "c w{8} w8 w7"}])],
)
def test_a_context_takes_the_place_of_the_last_user_message(prompt: Any, expected: Any) -> None:
    teacher = scoring(me={"of": "policy", "context": CONTEXT}).teachers["me"]
    row = ROW | {"prompt": prompt}
    assert with_context("me", teacher, row)["prompt"] == expected and row["prompt"] == prompt


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"columns": {}}, "has no 'hint'; it has data_source, ground_truth"),
        ({"prompt": MESSAGES[1:2]}, "no user message"),
        ({"images": [b""]}, "pictures"),
    ],
)
def test_a_row_without_what_a_context_names_fails_its_lease(changes: dict[str, Any], says: str) -> None:
    teacher = scoring(me={"of": "policy", "context": CONTEXT}).teachers["me"]
    with pytest.raises(LeaseFailed, match=says) as failed:
        with_context("me", teacher, ROW | changes)
    assert failed.value.reason == "prompt_not_rendered"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    make("tiny", path := tmp_path_factory.mktemp("models") / "tiny", 0)
    return config_of(path, 2, me={"of": "policy", "context": "{prompt} {hint}"})


async def test_the_policy_scores_its_own_answers_with_more_in_the_prompt(config: Config) -> None:
    task, row = Task(config), {**ROW, "prompt": "w5 w9"}
    async with serving(Path(config.model.path), max_context=config.max_context, scored_context=28) as engine:
        teachers = Teachers(config, engine, "rollout-0", model_fingerprint(config.model.path))
        group = await Generator(config, engine, task, LengthJudge(), teachers=teachers).group(lease_of(row), "0/1/1")  # type: ignore[arg-type]
        told = np.array(task.encode({**row, "prompt": "w5 w9 w8"}), np.int32)
        answers = np.split(group.token_ids, np.cumsum(group.lengths)[:-1])
        wanted = await engine.score(
            [np.concatenate((told, ids)) for ids in answers], [told.size] * 2, temperature=0.7, top=2
        )
    assert np.array_equal(group.teacher_logprobs, wanted.logprobs) and np.array_equal(group.teacher_ids, wanted.ids)
    assert np.abs(group.teacher_logprobs - group.logprobs).max() > 1e-3, "as if the prompt said no more"
    assert group.teachers == ["me@0"] * 2 and problem_with_scores(group, 2, config.scoring, 512) is None


async def test_rewards_and_scores_are_waited_for_at_the_same_time(config: Config) -> None:
    both, order = asyncio.Barrier(2), list[str]()

    async def judge(samples: list[Any]) -> Any:
        await both.wait()
        return await LengthJudge().score(samples)

    async def group(row: Any, answers: Any, counts: list[int], encode: Any) -> dict[str, Any]:
        await both.wait()
        order.append("scored")
        return {"teachers": ["me@0"] * len(counts)}

    async with serving(Path(config.model.path), max_context=config.max_context) as engine:
        given: Any = {"teachers": SimpleNamespace(group=group)}
        generator = Generator(config, engine, Task(config), SimpleNamespace(score=judge), **given)  # type: ignore[arg-type]
        made = await asyncio.wait_for(generator.group(lease_of(ROW), "0/1/1"), 30)
    assert made.teachers == ["me@0"] * 2 and order == ["scored"]


async def test_a_teacher_that_fails_a_lease_ends_its_rewards(config: Config) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def judge(samples: list[Any]) -> Any:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def group(*_: Any) -> dict[str, Any]:
        await begun.wait()
        raise LeaseFailed("teacher_error", "gone")

    async with serving(Path(config.model.path), max_context=config.max_context) as engine:
        given: Any = {"teachers": SimpleNamespace(group=group)}
        generator = Generator(config, engine, Task(config), SimpleNamespace(score=judge), **given)  # type: ignore[arg-type]
        with pytest.raises(LeaseFailed, match="teacher_error: gone"):
            await asyncio.wait_for(generator.group(lease_of(ROW), "0/1/1"), 30)
    assert ended.is_set()
