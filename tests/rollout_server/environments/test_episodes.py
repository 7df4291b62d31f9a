"""Episodes in a real process over the torch engine: what they leave, and how each of their failures ends."""

import asyncio
import logging
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs import Config, ConfigError
from replay import messages as m
from replay.state.answers import problem_with_errors
from replay.state.leases import Slot
from replay.state.validation import Bounds, problem_with
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.episodes import EpisodeGenerator
from rollout_server.generate import LeaseFailed
from rollout_server.tasks.environments import EnvironmentFailed
from rollout_server.tasks.environments.conversation import Conversation
from rollout_server.tasks.environments.worker import BUILT_IN
from tests.rollout_server.small_generator import (
    PROMPT,
    PROMPT_TOKENS,
    config_of,
    episodes_of,
    evaluation_lease,
    lease_of,
)
from tests.support.waiting import eventually

FUNCTIONS = Path(__file__).with_name("functions.py")
GROUP, CAP = 3, 24
TURN = ["turn", [[5], 1]]
ACTS: dict[str, list[Any]] = {
    "last_answer": [["turn", [[5, 6], 4]]],
    "long_answer": [["turn", [[5], None]]],
    "raises": [TURN, ["raise", "no such game"]],
    "sleeps": [TURN, ["sleep", 600]],
    "dies": [TURN, ["exit", 3]],
    "no_turn": [["return", 1.0]],
    "not_a_number": [TURN, ["return", float("nan")]],
    "wrong_ids": [["turn", [[5, -1], 1]]],
}
"""Functions that need no code of their own."""


@asynccontextmanager
async def playing(
    folder: Path,
    function: str,
    prompt_tokens: int = PROMPT_TOKENS,
    options: dict[str, Any] | None = None,
    **environment: Any,
) -> AsyncIterator[EpisodeGenerator]:
    plain = config_of(folder, GROUP, CAP).model_dump()
    plain["data"]["max_prompt_tokens"] = prompt_tokens
    if function in ACTS:
        function, options = "acts", {"acts": ACTS[function]}
    name = function if ":" in function or function in BUILT_IN else f"{FUNCTIONS}:{function}"
    plain["environment"] |= {"function": {name: options}, **environment}
    config = Config.model_validate(plain)
    async with episodes_of(config) as generator:
        yield generator


def lease(index: int = 1, **prompt: Any) -> m.Lease:
    return lease_of({**PROMPT, **prompt}, index)


def all_failed(group: m.Group, said: str) -> bool:
    """Whether every episode is named as failed and left out, the first with these words."""
    assert re.search(said, group.error_detail), group.error_detail
    return group.errors == ["environment_error"] * GROUP and group.left_out.all() and not group.rewards.any()


async def ending_of(generator: EpisodeGenerator, lease: m.Lease, name: str) -> str:
    """Why the lease or its episodes failed, or "" for a whole group."""
    try:
        return max((await generator.group(lease, name)).errors, default="")
    except LeaseFailed as failed:
        return failed.reason


def accepted(group: m.Group, config: Config) -> bool:
    slot = Slot((group.pass_, group.index), {}, 0, attempt=1)
    return problem_with(group, slot, config, Bounds(0, None)) is None


async def test_three_turns_are_one_sample_and_the_same_again(folder: Path) -> None:
    async with playing(folder, "three_turns") as generator:
        group = await generator.group(lease(), "0/1/1")
        again = await generator.group(lease(), "0/1/2")
    assert accepted(group, generator.config)
    assert not group.samples.size and not group.prompt_lengths.size, "all have the same prompt, which they share"
    assert len(set(group.rewards.tolist())) > 1, "each episode draws with a seed of its own"
    ends = np.cumsum(group.lengths)
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        mask, ids = group.loss_mask[start:end], group.token_ids[start:end]
        assert set(ids[mask == 0].tolist()) <= {7, 8} and not group.logprobs[start:end][mask == 0].any()
        assert int((mask == 0).sum()) == 4 and mask[0] == mask[-1] == 1
    for name in ("token_ids", "rewards", "loss_mask"):
        assert np.array_equal(getattr(group, name), getattr(again, name)), f"{name} differs for the same seeds"
    assert group.reward_metrics["episode/turns"] == 3.0
    assert group.reward_metrics["episode/environment_tokens"] == 4.0


async def test_samples_of_an_episode_move_as_one_trajectory(folder: Path) -> None:
    async with playing(folder, "compacts") as generator:
        group = await generator.group(lease(), "0/1/1")
    assert accepted(group, generator.config)
    assert group.samples.tolist() == [2] * GROUP and group.lengths.size == 2 * GROUP
    assert group.prompt_lengths.tolist() == [2, 3] * GROUP
    assert group.reward_metrics["told"] == 2.0 and group.reward_metrics["episode/samples"] == 2.0


async def test_turns_that_are_left_out_are_context(folder: Path) -> None:
    async with playing(folder, "leaves_out") as generator:
        group = await generator.group(lease(), "0/1/1")
    first = group.loss_mask[: group.lengths[0]].tolist()
    assert first[0] == 0 and first[-1] == 1 and group.reward_metrics["own"] == 3.0


async def test_an_episode_without_room_ends_with_nothing(folder: Path) -> None:
    async with playing(folder, "never_ends", max_turns=50) as generator:
        group = await generator.group(lease(), "0/1/1")
        assert accepted(group, generator.config)
        assert group.rewards.tolist() == [0.0] * GROUP and int(group.lengths.max()) <= CAP
        assert group.reward_metrics["episode/ContextFull"] == 1.0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", "KeyError: 'no such game' at .*functions.py"),
        ("no_turn", "an episode ended without a turn"),
        ("not_a_number", "the reward nan is not a finite number"),
        ("wrong_ids", "a context is text, token ids or messages"),
        ("dies", "environment process 0 died: it hung up .exit code 3"),
    ],
)
async def test_failed_episodes_are_named_and_the_next_ones_run(folder: Path, function: str, said: str) -> None:
    async with playing(folder, function) as generator:
        for attempt in (1, 2):
            assert all_failed(group := await generator.group(lease(), f"0/1/{attempt}"), said)
            assert accepted(group, generator.config)
        await eventually(lambda: not generator.engine.running_tokens(), "requests that nothing waits for end")
        assert not generator.running_tokens()


async def test_the_death_of_a_process_costs_the_next_one_nothing(folder: Path) -> None:
    """It has nothing left to cancel: the process that takes its place must not be killed for its silence."""
    async with playing(folder, "thinks", options={"sleep_s": 0.6}, turn_timeout_s=2.0) as generator:
        working = asyncio.create_task(generator.group(lease(), "0/1/1"))
        await eventually(lambda: sum(generator.running_tokens().values()) == 2 * GROUP, "first turns")
        process = generator.environments._processes[0].worker.process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        assert all_failed(await working, "environment process 0 died")
        group = await generator.group(lease(), "0/1/2")
    assert accepted(group, generator.config) and group.rewards.tolist() == [1.0] * GROUP


async def test_turns_at_once_leave_no_clock_running(folder: Path) -> None:
    async with playing(folder, "two_at_once", turn_timeout_s=1.8, options={"sleep_s": 1.0}) as generator:
        group = await generator.group(lease(), "0/1/1")
    assert 2.0 <= group.reward_metrics["episode/environment_s"] < 3.5, "its own time, without the engine's"


async def test_what_goes_wrong_is_said_at_once_and_the_next_episode_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with playing(folder, "goes_wrong") as generator:
        with pytest.raises(LeaseFailed, match="an episode ended without a turn") as failed:
            await generator.group(lease(ground_truth="room"), "0/1/room")
        assert failed.value.reason == "prompt_too_long"
        for wrong, said in (
            ("turn", r"leave_out \[-1\]: the episode has had the turns \[0\]"),
            ("forge", "environment process 0 sent garbage"),
        ):
            assert all_failed(await generator.group(lease(ground_truth=wrong), f"0/1/{wrong}"), said)
        for when in ("wait", "late"):
            group = await generator.group(lease(ground_truth=when), f"0/1/{when}")
            assert group.lengths.tolist() == [1] * GROUP, "a turn that is not waited for ends, and is not trained"
            assert group.reward_metrics["episode/turns"] == 1.0

        def encode(*_: Any) -> list[int]:
            raise IndexError("of a template")

        monkeypatch.setattr(Conversation, "encode", encode)
        group = await asyncio.wait_for(generator.group(lease(), "0/1/1"), 20)
        assert all_failed(group, "an unexpected IndexError: of a template")


@pytest.mark.parametrize(
    ("function", "key", "owed_by"),
    [
        ("sleeps", "turn_timeout_s", "the function of 0/1/1/[0-2] after 1 turns from environment process 0"),
        ("sleeps", "episode_timeout_s", "0/1/1/[0-2] from environment process 0"),
        ("three_turns", "turn_timeout_s", "a turn of 0/1/1/[0-2] from the engine"),
    ],
)
async def test_a_deadline_of_an_episode_leaves_a_hang_report(
    folder: Path, reported: Callable[[], str], monkeypatch: pytest.MonkeyPatch, function: str, key: str, owed_by: str
) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.sleep(60)

    if owed_by.endswith("engine"):
        monkeypatch.setattr(TorchEngine, "generate", never)
    async with playing(folder, function, **{key: 1.2}) as generator:
        group = await generator.group(lease(), "0/1/1")
    assert all_failed(group, rf"environment.{key} = 1.2.*; hang report: .*/hang-")
    said = await asyncio.to_thread(reported)
    assert re.fullmatch(rf"me waited 1.2 s for {owed_by} \(environment.{key}\)", said), said


async def test_a_cancelled_lease_ends_in_the_middle_of_a_turn_and_between_two(folder: Path) -> None:
    for function in ("sleeps", "long_answer"):
        async with playing(folder, function) as generator:
            working = asyncio.create_task(generator.group(lease(), "0/1/1"))
            await eventually(lambda g=generator: sum(g.running_tokens().values()) > 0, "a token")
            generator.abort("0/1/1")
            generator.abort("0/9/9")
            with pytest.raises(LeaseFailed) as failed:
                await working
            assert failed.value.reason == "aborted"


async def test_a_function_that_blocks_is_named_and_stops_nothing_else(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with playing(folder, "blocks", turn_timeout_s=3.0) as generator:
        others = asyncio.create_task(generator.group(lease(2), "0/2/1"))
        await eventually(generator.running_tokens, "the other one is there")
        blocked, longest = asyncio.create_task(generator.group(lease(1, ground_truth="block"), "0/1/1")), 0.0
        while not (blocked.done() and others.done()):
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
        assert all_failed(await blocked, "environment")
        assert others.exception() is None or getattr(others.exception(), "reason", "") == "aborted"
        assert longest < 2.5, "the loop of the engine went on"
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "has blocked the event loop" in text and "functions.py" in text and "in blocks: time.sleep(600)" in text


async def test_time_that_a_function_blocks_is_measured(folder: Path) -> None:
    async with playing(folder, "stutters") as generator:
        group = await generator.group(lease(), "0/1/1")
    assert group.reward_metrics["episode/blocked_s"] * GROUP > 1.0


async def test_an_evaluation_runs_at_its_version(folder: Path) -> None:
    wanted = evaluation_lease(CAP)
    async with playing(folder, "three_turns") as generator:
        await generator.engine.pin(0)
        result = await generator.evaluation(wanted)
        assert result.lengths.size == result.rewards.size == len(result.texts) == 2
        assert result.texts[0] == result.texts[1], "greedy"
        with pytest.raises(Exception, match="version 5"):
            await generator.evaluation(replace(wanted, version=5))


async def test_an_episode_of_an_evaluation_that_fails_is_played_again(folder: Path) -> None:
    async with playing(folder, "stumbles") as generator:
        await generator.engine.pin(0)
        result = await generator.evaluation(evaluation_lease(CAP))
    assert result.rewards.tolist() == [1.0, 1.0] and not result.errors


async def test_a_prompt_that_cannot_be_asked_costs_an_evaluation_its_own_episodes_alone(folder: Path) -> None:
    shown = {"images": [b"no picture"]}
    rows = [PROMPT | each | {"prompt": "5"} for each in ({"ground_truth": "wait"}, {"ground_truth": "room"}, shown)]
    async with playing(folder, "goes_wrong", on_error="score", error_score=-1.0) as generator:
        await generator.engine.pin(0)
        done = await generator.evaluation(evaluation_lease(CAP, samples=1, prompts=[*rows, rows[0]]))
    assert done.errors == ["", "prompt_too_long", "prompt_not_rendered", ""] and problem_with_errors(done, 4) is None
    assert done.rewards.tolist() == [1.0, 0.0, 0.0, 1.0] and done.left_out.tolist() == [0, 1, 1, 0], "nor scored"
    assert done.finish_reasons[1:3] == ["error"] * 2 and "an episode ended without a turn" in done.error_detail


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("not_asynchronous", "take `async def not_asynchronous"),
        ("nothing", "has no function 'nothing'"),
        ("missing.py:rollout", "environment.function: 'missing.py:rollout': no file"),
    ],
)
async def test_a_function_that_cannot_be_used_is_refused_at_the_start(folder: Path, function: str, said: str) -> None:
    with pytest.raises(EnvironmentFailed, match=said):
        async with playing(folder, function):
            pass


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": {"function": "tools"}, "replay": {"partial_rollouts": True}}, "replay.partial_rollouts: true"),
        ({"environment": {"function": "tools", "turn_timeout_s": 500}}, "turn_timeout_s: 500 is not below"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], said: str) -> None:
    plain: dict[str, Any] = {"model": {"path": "none"}, "data": {"train": "none.jsonl"}}
    with pytest.raises((ConfigError, ValueError), match=said):
        Config.model_validate(plain | changes)
