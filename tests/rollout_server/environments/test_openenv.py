"""Servers of OpenEnv's protocol, as processes on the loopback interface, spoken to by a scripted policy."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.rollout_server.environments.scripted import Scripted

pytest.importorskip("aiohttp", reason="the extra `openenv` is not installed")
import openenv_servers as openenv

from rollout_server.tasks.environments import EnvironmentFailed, Trajectory

HERE = Path(__file__).parent
ROW: dict[str, Any] = {"prompt": [{"role": "user", "content": "Play."}], "columns": {"seed": 4}}


def served(script: str) -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, str(HERE / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()


@pytest.fixture(scope="module")
def stand_in() -> Iterator[str]:
    yield from served("openenv_stand_in.py")


async def play(answers: Sequence[str], row: dict[str, Any] = ROW, **options: Any) -> tuple[Scripted, Trajectory]:
    await asyncio.to_thread(openenv.prepare, options)
    client = Scripted(answers, options)
    return client, await openenv.rollout(row, client)  # type: ignore[arg-type]


async def test_an_episode_goes_on_until_the_server_is_done(stand_in: str) -> None:
    client, played = await play(["3", "9", "5"], url=stand_in)
    said = [message["content"] for message in client.contexts[2]]
    assert said == ["Play.\nGuess a number from 1 to 9.", "3", "higher", "9", "lower"], "the row's seed, 4, hides a 5"
    assert played.reward == pytest.approx(0.8) and played.metrics["episode/finished"] == 1.0
    assert played.metrics["episode/moves"] == 3.0
    _, last = await play(["3", "5"], url=stand_in, reward="last", reset={"most": 6})
    assert last.reward == 1.0


async def test_text_and_json_actions_and_a_full_context(stand_in: str) -> None:
    client, played = await play(["no JSON", '{"message": "5"}'], url=stand_in, action="json", style="text")
    assert client.contexts[1] == "Play.\nGuess a number from 1 to 9.\nno JSON\nerror: the answer is no JSON object\n"
    assert (played.reward, played.metrics["episode/invalid_move"]) == (1.0, 1.0)
    _, cut = await play(["3"], url=stand_in)
    assert (cut.reward, cut.metrics["episode/finished"]) == (-0.1, 0.0), "what was reached counts"


async def test_episodes_wait_for_a_place(stand_in: str) -> None:
    """The servers have two; a place that is free again is taken."""

    async def one(number: int) -> float:
        row = {**ROW, "columns": {"seed": number}}
        client = Scripted(["1", "2", "3"], options)
        return (await openenv.rollout(row, client)).reward or 0.0  # type: ignore[arg-type]

    options = {"url": [stand_in], "wait_s": 20}
    await asyncio.to_thread(openenv.prepare, options)
    rewards = await asyncio.gather(*(one(number) for number in range(6)))
    assert [round(reward, 1) for reward in rewards] == [1.0, 0.9, 0.8, -0.3, -0.3, -0.3]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("error", "reset: EXECUTION_ERROR: 'no such game'"),
        ("list", r"the answer to reset is \['observation'\]; expected a type and data"),
        ("observation", "expected observation, reward and done"),
        ("text", "the answer to reset is no JSON: 'no JSON'"),
        ("end", "the session ended at reset"),
        ("silent", r"no answer to reset within 0.5 s \(environment.function.*.wait_s\)"),
    ],
)
async def test_a_server_that_breaks_the_protocol_is_named(stand_in: str, fault: str, said: str) -> None:
    with pytest.raises(openenv.ServerFailed, match=f"{stand_in}: .*{said}"):
        await play(["1"], url=stand_in, reset={"fault": fault}, wait_s=0.5 if fault == "silent" else 20.0)


async def test_a_server_that_is_gone_is_passed_over(stand_in: str, capsys: pytest.CaptureFixture[str]) -> None:
    gone = "http://127.0.0.1:9"
    for _ in range(2):
        _, played = await play(["5"], url=[stand_in, gone], wait_s=5)  # 7 episodes of a prompt begin at the second one
        assert played.reward == 1.0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"openenv: {gone}: no session (") and line.endswith(f"are played at {stand_in}")
    with pytest.raises(openenv.ServerFailed, match=rf"{gone}: no session .*; {gone}/b: no session"):
        await play(["5"], url=[f"{gone}/b", gone], action="message", wait_s=5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "url: None; give the address of a server"),
        ({"url": "http://127.0.0.1:9", "style": "poem"}, "style: 'poem'; take one of"),
        ({"url": "localhost:8000"}, "url: 'localhost:8000'; give"),
        ({"url": "http://127.0.0.1:9"}, "does not say what actions are .*; start the server first"),
        ({"url": "http://127.0.0.1:9", "rewards": "sum"}, "rewards: unknown"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentFailed, match=said):
        openenv.prepare(options)
