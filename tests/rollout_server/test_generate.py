"""Leases become groups: what may not happen on the event loop, the policies of a group, forced lengths, exit codes."""

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs import Config
from examples.random_qwen3 import make
from replay import messages as m
from replay.channel import PeerRefused
from replay.state.answers import problem_with_errors
from rollout_server import main as rollout_main
from rollout_server.engines import Completion
from rollout_server.engines.base import EngineError
from rollout_server.generate import Generator, LeaseFailed
from rollout_server.tasks.pictures import Prompt
from rollout_server.tasks.rewards import RewardOutcome, Sample
from rollout_server.teachers import TeacherError
from slipstream.runtime.lifeline import CANNOT_START
from tests.rollout_server.small_generator import PROMPT, config_of, evaluation_lease, generating
from tests.rollout_server.torch_served import Gates
from tests.support.waiting import eventually
from weight_bus.errors import NotAvailable, RemovedFromBus

EVALUATION = evaluation_lease(5, samples=1)
TOO_LONG = PROMPT | {"prompt": "w5 " * 99}
LIMIT_S = 5.0
CONFIG = {"model": {"path": "none"}, "data": {"train": "none.jsonl"}, "rollout": {"group_size": 2}}


ANSWER = Completion(
    token_ids=np.array([7, 0], np.int32),
    logprobs=np.zeros(2, np.float32),
    versions=np.zeros(2, np.int32),
    finish_reason="stop",
)


async def generate(token_ids: list[int], sampling: Any, n: int, **_: Any) -> list[Completion]:
    return [ANSWER] * n


async def score(samples: list[Sample]) -> list[RewardOutcome]:
    return [RewardOutcome(score=1.0, seconds=0.0) for _ in samples]


class Task:
    """A tokenizer, one call of which takes until `go_on` is set."""

    stop_token_ids, stops = (0,), ()

    def __init__(self, slow: str) -> None:
        self.slow, self.reached, self.go_on = slow, threading.Event(), threading.Event()
        self.waited_in_vain = False

    def _maybe_wait(self, call: str) -> None:
        if call == self.slow:
            self.reached.set()
            self.waited_in_vain |= not self.go_on.wait(LIMIT_S)

    def prompt(self, row: dict[str, Any]) -> Prompt:
        self._maybe_wait("encode")
        return Prompt([3, 4])

    def decode(self, token_ids: list[int]) -> str:
        return "7"

    def sample(self, row: dict[str, Any], token_ids: list[int], finish_reason: str) -> dict[str, Any]:
        self._maybe_wait("decode")
        return {**row, "completion": "7"}


WORK = pytest.mark.parametrize("work", [lambda g: g.group(lease(1), "0/1/1"), lambda g: g.evaluation(EVALUATION)])


@WORK
@pytest.mark.parametrize("on_error", ["leave_out", "score"])
async def test_an_answer_whose_reward_failed_is_named_beside_the_others(
    work: Callable[[Generator], Any], on_error: str
) -> None:
    async def fails(samples: list[Sample]) -> list[RewardOutcome]:
        return [*(await score(samples))[1:], RewardOutcome(score=np.nan, seconds=0.0, error="KeyError: 'answer'")]

    config = Config.model_validate(CONFIG | {"reward": {"on_error": on_error, "error_score": -1}})
    engine, rewards = SimpleNamespace(generate=generate), SimpleNamespace(score=fails)
    done = await work(Generator(config, engine, Task(""), rewards))  # type: ignore[arg-type]
    assert done.errors[-1] == "reward_error" and not any(done.errors[:-1]) and "KeyError: 'answer'" in done.error_detail
    assert done.left_out.any() == done.left_out[-1] == (on_error == "leave_out")
    assert done.rewards[-1] == (0.0 if on_error == "leave_out" else -1.0)


async def test_an_evaluation_judges_an_answer_again_before_it_counts_as_failed() -> None:
    judged: list[int] = []

    async def fails_twice(samples: list[Sample]) -> list[RewardOutcome]:
        judged.append(len(samples))
        first = RewardOutcome(score=np.nan, seconds=0.0, error="busy" if len(judged) < 3 else None)
        return [replace(first, score=1.0) if len(judged) == 3 else first, *(await score(samples))[1:]]

    engine, rewards = SimpleNamespace(generate=generate), SimpleNamespace(score=fails_twice)
    generator = Generator(Config.model_validate(CONFIG), engine, Task(""), rewards)  # type: ignore[arg-type]
    done = await generator.evaluation(evaluation_lease(5, samples=2))
    assert judged == [2, 1, 1] and not done.errors and done.rewards.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("slow", ["encode", "decode"])
@WORK
async def test_the_loop_goes_on_while_texts_are_encoded_and_decoded(
    slow: str, work: Callable[[Generator], Any]
) -> None:
    """It also runs SGLang's frontend and the updates of its weights."""
    task, engine, rewards = Task(slow), SimpleNamespace(generate=generate), SimpleNamespace(score=score)
    generator = Generator(Config.model_validate(CONFIG), engine, task, rewards)  # type: ignore[arg-type]
    working = asyncio.create_task(work(generator))
    assert await asyncio.to_thread(task.reached.wait, LIMIT_S)
    task.go_on.set()
    done = await working
    assert not task.waited_in_vain, "the call kept the loop from setting the event"
    assert set(done.rewards) == {1.0}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NotAvailable("no UCC here"), CANNOT_START),
        (PeerRefused("another model folder", "closed"), CANNOT_START),
        (TeacherError("waited 300 s for scores"), CANNOT_START),
        (RemovedFromBus("failed 3 updates in a row"), 2),
    ],
)
def test_what_would_end_alike_is_not_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: RuntimeError, code: int
) -> None:
    async def run(*_: object, **__: object) -> int:
        raise ExceptionGroup("serving", [ExceptionGroup("following", [error])])

    monkeypatch.setattr(rollout_main, "run", run)
    monkeypatch.setattr(rollout_main, "set_up_logging", lambda *_: None)
    arguments = ["--config", "configs/quickstart.yaml", "--replay", "tcp://127.0.0.1:1", "--set", f"run.dir={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["rollout_server.main", *arguments])
    assert rollout_main.main() == code


# ---- with a real engine -----------------------------------------------------------------------------------

GROUP, CAP = 6, 40


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("models") / "tiny"
    make("tiny", path, 0)
    return config_of(path, GROUP, CAP)


def lease(seed: int) -> m.Lease:
    return m.Lease(pass_=0, index=seed, attempt=1, min_version=0, lease_s=60.0, seed=seed, prompt=PROMPT)


async def test_an_evaluation_has_k_answers_a_prompt_and_the_same_ones_when_it_is_repeated(config: Config) -> None:
    other = PROMPT | {"prompt": "w7 w8"}
    asked: dict[str, Any] = {"greedy": False, "set": "aime", "samples": 3, "temperature": 0.7}
    whole = evaluation_lease(6, **asked, prompts=[PROMPT, other])
    second = evaluation_lease(6, **asked, prompts=[other], first=1)
    async with generating(config) as generator:
        await generator.engine.pin(0)
        first, again, rest = [await generator.evaluation(lease) for lease in (whole, whole, second)]
    assert (first.set, first.samples, first.greedy, len(first.texts)) == ("aime", 3, False, 6)
    assert len(set(first.texts)) > 3 and first.lengths.max() <= 6
    assert first.texts == again.texts, "a seed for each prompt, a stream for each of its answers"
    assert first.texts[3:] == rest.texts and rest.first == 1, "in whatever part it comes"


async def test_a_prompt_of_an_evaluation_that_cannot_be_asked_is_named_beside_the_others(config: Config) -> None:
    fine = PROMPT | {"ground_truth": "7"}
    rows = [fine, TOO_LONG, PROMPT | {"prompt": [{"role": "user", "content": "w5"}]}, fine]
    judged = Config.model_validate(config.model_dump() | {"reward": {"function": "exact"}})
    async with generating(judged) as generator:
        await generator.engine.pin(0)
        done = await generator.evaluation(evaluation_lease(6, prompts=rows))
        alone = await generator.evaluation(evaluation_lease(6, prompts=[TOO_LONG]))
    codes = ["", "prompt_too_long", "prompt_not_rendered", ""]
    assert done.errors == [code for code in codes for _ in range(2)] and "has 99 tokens" in done.error_detail
    assert done.left_out.tolist() == [0, 0, 1, 1, 1, 1, 0, 0] and problem_with_errors(done, 8) is None
    assert done.texts[0] == done.texts[7] != "" and set(done.texts[2:6]) == {""} and done.lengths[7] > 0
    assert alone.errors == ["prompt_too_long"] * 2 and alone.left_out.all(), "and where no other is"


async def test_an_evaluation_that_fails_ends_its_requests_and_fails_again_for_the_same_reason(config: Config) -> None:
    rows = [PROMPT, TOO_LONG, PROMPT | {"prompt": "w7 w8"}]
    length, tries = 400, 20
    wanted = evaluation_lease(length, samples=8, prompts=rows)
    async with generating(config_of(Path(config.model.path), GROUP, length)) as generator:
        generator.task.stop_token_ids, generator.task._max_prompt_tokens = (), 99
        await generator.engine.pin(0)
        for _ in range(tries):
            with pytest.raises(EngineError, match="99"):
                await generator.evaluation(wanted)
            await asyncio.sleep(0.003)
        await eventually(lambda: not generator.running_tokens(), "all have ended")
        assert (await generator.engine.health()).generated_tokens < tries * 8 * length, "none goes on to its end"


async def test_a_lease_is_renewed_and_aborted_by_its_own_name(config: Config, gate_at: Gates) -> None:
    async with generating(config) as generator:
        await generator.engine.pause("keep_kv")
        doomed = asyncio.create_task(generator.group(lease(1), "0/1/1"))
        other = asyncio.create_task(generator.group(lease(11), "0/11/1"))
        await eventually(lambda: len(generator.running_tokens()) == 2, "both are there")
        gate = gate_at(3)
        await generator.engine.resume()
        await gate.reached()
        pausing = await gate.posted(generator.engine.pause("keep_kv"))
        gate.release()
        await pausing
        assert set(generator.running_tokens()) == {"0/1/1", "0/11/1"}
        generator.abort("0/1/1")
        generator.abort("nobody")
        await generator.engine.resume()
        with pytest.raises(LeaseFailed, match="aborted"):
            await doomed
        assert (await other).lengths.size == GROUP


async def test_answers_end_with_the_token_that_completes_a_stop_string(tmp_path: Path) -> None:
    """They are beginnings of the answers without it, also in an evaluation; rewards see the text before it."""
    make("tiny", tmp_path, 1)
    plain = config_of(tmp_path, 4, 40)
    sections = plain.model_dump()
    sections["rollout"]["stop"] = ["11", "w2"]
    lease = m.Lease(pass_=0, index=1, attempt=1, min_version=0, lease_s=60.0, seed=5, prompt=PROMPT)
    found = []
    for config in (plain, Config.model_validate(sections)):
        async with generating(config) as generator:
            answers = await generator.sample(generator.encode(PROMPT), lease, "0/1/1")
            await generator.engine.pin(0)
            evaluation = await generator._answered(EVALUATION, generator.encode(PROMPT), 0, "evaluation")
            found.append([*answers, *evaluation])
            task = generator.task
    cut = 0
    for whole, answer in zip(*found, strict=True):
        ids, size = answer.token_ids.tolist(), answer.token_ids.size
        assert whole.token_ids[:size].tolist() == ids and np.array_equal(whole.logprobs[:size], answer.logprobs)
        text = task.text(ids)
        assert "11" not in text and "w2" not in text and task.decode(ids).startswith(text)
        assert (size < whole.token_ids.size) <= (answer.finish_reason == "stop")
        assert task.sample(PROMPT, ids, "stop")["completion"] == text
        cut += size < whole.token_ids.size
    assert cut >= 2
