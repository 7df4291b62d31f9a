"""Episodes of several prompts in one environment process: what happens to one costs the others little."""

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from configs.environment import Environment
from configs.variants import Choice
from replay.state.leases import INTERRUPTIONS
from rollout_server.episodes import EpisodeGenerator
from rollout_server.tasks.environments.pool import Suspects
from rollout_server.tasks.environments.process import EnvironmentProcess
from tests.rollout_server.environments.test_episodes import GROUP, ending_of, lease, playing
from tests.support.waiting import eventually

MAX_ATTEMPTS = 3
"""replay.max_attempts, by default."""


def pid_of(generator: EpisodeGenerator) -> int:
    process = generator.environments._processes[0].worker.process
    assert process is not None
    return process.pid


async def ending(generator: EpisodeGenerator, index: int, attempt: int, ground_truth: str = "") -> str:
    return await ending_of(generator, lease(index, ground_truth=ground_truth), f"0/{index}/{attempt}")


async def test_the_death_of_a_process_is_one_error_of_all_its_leases(folder: Path) -> None:
    async with playing(folder, "sleeps") as generator:
        for attempt in (1, 2):
            leases = [asyncio.create_task(ending(generator, index, attempt)) for index in range(4)]
            await eventually(lambda: sum(generator.running_tokens().values()) == 4 * GROUP, "first turns")
            os.kill(pid_of(generator), signal.SIGKILL)
            reasons = await asyncio.gather(*leases)
            assert sorted(reasons) == ["aborted"] * 3 + ["environment_error"]
            assert reasons.index("environment_error") == attempt - 1, "another one each time"
    assert "aborted" in INTERRUPTIONS, "it says nothing about the prompt"


def test_prompts_of_two_shared_deaths_run_alone() -> None:
    suspects = Suspects()
    for names in (["0/1/1/0", "0/2/1/0"], ["0/4/1/0", "0/4/1/1"], ["0/4/2/0"]):
        suspects.charge(names)
    assert not any(suspects.has(f"0/{index}") for index in range(5))
    suspects.charge(["0/1/2/0", "0/3/1/0"])
    assert [suspects.has(f"0/{index}") for index in (1, 2, 3, 4)] == [True, False, False, False]


@pytest.mark.parametrize(("killed", "reason"), [("its loop is blocked", "aborted"), ("", "environment_error")])
async def test_a_process_that_was_killed_for_one_episode_is_no_error_of_the_others(killed: str, reason: str) -> None:
    environment = Environment(function=Choice("x.py:f", {}))
    process = EnvironmentProcess(environment, "p", frozenset(), Suspects().charge, temperature=1.0)
    gone = AsyncMock(side_effect=asyncio.IncompleteReadError(b"", 1))
    process.worker = SimpleNamespace(receive=gone, autopsy=AsyncMock(return_value=(-9, False, "")))  # type: ignore
    episode: Any = SimpleNamespace(session=SimpleNamespace(name="0/2/1/0"), has_ended=False, inbox=asyncio.Queue())
    process._killed, process._episodes = killed, {0: episode}
    await process._read()
    _, failed = episode.inbox.get_nowait()
    assert failed.reason == reason


async def test_a_prompt_that_ends_its_processes_is_soon_found(folder: Path) -> None:
    """As replay leases them again: the culprit uses its attempts up, and its neighbours do not."""
    failures, interruptions, done = Counter[int](), Counter[int](), set[int]()

    async def leased(generator: EpisodeGenerator, index: int) -> None:
        attempt = 0
        while index not in done and failures[index] < MAX_ATTEMPTS:
            attempt += 1
            reason = await ending(generator, index, attempt, "die" if index == 2 else "")
            assert reason in ("", "environment_error", *INTERRUPTIONS)
            if not reason:
                done.add(index)
            failures[index] += reason == "environment_error"
            interruptions[index] += reason in INTERRUPTIONS

    async with playing(folder, "dies_where_told") as generator:
        await asyncio.wait_for(asyncio.gather(*(leased(generator, index) for index in range(4))), 60)
        assert generator.environments._slots.free == generator.config.environment.max_episodes
    assert done == {0, 1, 3} and failures[2] == MAX_ATTEMPTS
    assert max(failures[index] for index in done) <= 1 and failures.total() <= 5
    assert max(interruptions.values()) <= 2


async def test_an_episode_that_waits_for_a_place_is_called_off_at_once(folder: Path) -> None:
    async with playing(folder, "sleeps", max_episodes=GROUP) as generator:
        first = asyncio.create_task(ending(generator, 1, 1))
        await eventually(lambda: sum(generator.running_tokens().values()) == GROUP, "first turns")
        second = asyncio.create_task(ending(generator, 2, 1))
        await asyncio.sleep(0.1)
        generator.abort("0/2/1")
        assert await asyncio.wait_for(second, 20) == "aborted"
        assert not generator.environments._slots.waiting, "its place in the line is given up"
        generator.abort("0/1/1")
        assert await first == "aborted"


async def test_an_episode_that_cleans_up_for_long_ends_no_other(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marks, options = tmp_path / "marks", {"sleep_s": 3.0, "clean_up_s": 4.0}
    async with playing(folder, "cleans_up", options=options, turn_timeout_s=10) as generator:
        other = asyncio.create_task(ending(generator, 2, 1))
        first = asyncio.create_task(ending(generator, 1, 1, str(marks)))
        await eventually(lambda: sum(generator.running_tokens().values()) == 2 * GROUP, "first turns")
        generator.abort("0/1/1")
        assert await asyncio.wait_for(first, 3) == "aborted", "what replay waits for is told at once"
        assert await other == ""
        await eventually(lambda: marks.exists() and marks.read_text() == "clean\n" * GROUP, "the end of all cleanup")
        await eventually(lambda: not generator.environments._processes[0]._leaving, "word of it")
    assert "has not ended" not in caplog.text


async def test_an_episode_that_never_ends_is_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"sleep_s": 0.1, "clean_up_s": 600}
    async with playing(folder, "cleans_up", options=options, turn_timeout_s=1) as generator:
        first = asyncio.create_task(ending(generator, 1, 1, str(tmp_path / "marks")))
        await eventually(lambda: sum(generator.running_tokens().values()) == GROUP, "first turns")
        pid = pid_of(generator)
        generator.abort("0/1/1")
        assert await first == "aborted"
        said = "the function of 0/1/1/0 was called off and has not ended within environment.turn_timeout_s = 1 s"
        await eventually(lambda: said in caplog.text, "its name")
        assert await ending(generator, 2, 1) == "" and pid_of(generator) == pid


async def test_a_long_step_beside_a_cancel_ends_nobody(folder: Path) -> None:
    """The process cannot say within 2.6 s that it has seen the cancel, and has done nothing wrong."""
    async with playing(folder, "steps", turn_timeout_s=8.0) as generator:
        pid = pid_of(generator)
        others = [asyncio.create_task(ending(generator, index, 1)) for index in range(3)]
        await eventually(lambda: sum(generator.running_tokens().values()) == 3 * GROUP, "first turns")
        slow = asyncio.create_task(ending(generator, 3, 1, "2.6"))
        await asyncio.sleep(0.3)
        generator.abort("0/0/1")
        assert await asyncio.gather(*others, slow) == ["aborted", "", "", ""] and pid_of(generator) == pid


async def test_an_episode_that_is_called_off_before_it_starts_ends_no_other(folder: Path) -> None:
    async with playing(folder, "sleeps") as generator:
        pid, running = pid_of(generator), generator.environments._processes[0]
        first = asyncio.create_task(ending(generator, 1, 1))
        while running.load < GROUP:  # noqa: ASYNC110 - the process must not have read of it
            await asyncio.sleep(0)
        generator.abort("0/1/1")
        assert await first == "aborted"
        await eventually(lambda: not running._leaving, "word of their end")
        assert pid_of(generator) == pid and not running._killed
