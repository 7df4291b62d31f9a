"""Environments of verifiers, through its own servers and ours, spoken to by a scripted policy."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rollout_server.environments.scripted import Scripted

pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")
pytest.importorskip("aiohttp", reason="the extra `agents` is not installed")
import verifiers_chat
import verifiers_tasks

from replay.data import load_rows
from rollout_server.tasks.environments import EnvironmentFailed

TASKS = {"id": "sum_tasks"}
TRIES = {"taskset": TASKS, "env": {"id": "two_tries"}}
SOLVER = {**TRIES, "seat": "solver"}


@pytest.fixture(autouse=True)
def left_as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(verifiers_tasks, "_played", [])
    monkeypatch.setattr(verifiers_chat, "_clients", [])  # of the loop of another test
    monkeypatch.setattr(verifiers_tasks, "_open", AsyncExitStack())
    monkeypatch.setattr(verifiers_tasks, "_starting", asyncio.Lock())
    for name in ("NO_PROXY", "no_proxy", verifiers_tasks.RELAY_KEY):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@asynccontextmanager
async def prepared(options: dict[str, Any]) -> AsyncIterator[None]:
    """The environment, whose servers end with the test."""
    verifiers_tasks.prepare(options)
    async with verifiers_tasks._open:
        yield


def rows(options: str = "") -> list[dict[str, Any]]:
    return list(load_rows(f"verifiers:sum_tasks?skip=2&rows=3{options}"))


async def test_tasks_are_played_and_their_rewards_count(tmp_path: Path) -> None:
    row = rows()[0]
    assert row["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+1"}]
    client = Scripted(["3", "4"])
    async with prepared({"taskset": TASKS}):
        right = await verifiers_tasks.rollout(row, client)  # type: ignore[arg-type]
        wrong = await verifiers_tasks.rollout(row, client)  # type: ignore[arg-type]
    assert client.contexts == [row["prompt"]] * 2
    assert (right.reward, right.metrics, right.leave_out) == (2.0, {"correct": 1.0, "letters": 1.0}, [])
    assert (wrong.reward, wrong.leave_out) == (0.0, [])


async def test_seats_that_are_not_trained_stay_context(tmp_path: Path) -> None:
    row = rows("&first=5")[0]
    client = Scripted(["7", "no", "8"])
    async with prepared(SOLVER):
        played = await verifiers_tasks.rollout(row, client)  # type: ignore[arg-type]
    assert [message["content"] for message in client.contexts[2]] == ["Add.", "7+1", "7", "Try again."]
    assert (played.reward, played.leave_out) == (2.0, [1])


async def test_a_refused_request_and_proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the endpoint refuses fails the episode with its words; no proxy is asked for what is on this machine."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    row = rows()[0]
    async with prepared({"taskset": TASKS}):
        played = await verifiers_tasks.rollout(row, Scripted(["3"]))  # type: ignore[arg-type]
        assert played.reward == 2.0
        (mine,) = verifiers_tasks._played
        assert mine.endpoint is not None
        monkeypatch.setattr(mine.endpoint, "relay_key", "another")
        with pytest.raises(verifiers_tasks.TaskFailed, match=r"invalid_api_key|401"):
            await verifiers_tasks.rollout(row, Scripted(["3"]))  # type: ignore[arg-type]
        assert not mine.endpoint._episodes and not mine.endpoint._sessions, "every key ends with its episode"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "options.taskset: None; name an installed one"),
        ({"taskset": TASKS, "sampling": "perhaps"}, "options.sampling: 'perhaps'; take one of"),
        ({"taskset": {"id": "no-such-tasks"}}, "'no-such-tasks' cannot be played: .*not found"),
        (TRIES, "options.seat: None; the environment has solver, critic, of which one is trained"),
        (
            {"taskset": TASKS, "env": {"agent": {"harness": {"id": "bash"}}}},
            "the harness 'bash' lets the policy run programs on this machine",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentFailed, match=said):
        verifiers_tasks.prepare(options)
