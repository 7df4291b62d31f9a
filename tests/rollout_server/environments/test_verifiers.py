"""Environments of verifiers, through its own servers and ours, spoken to by a scripted policy."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted

pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")
pytest.importorskip("aiohttp", reason="the extra `agents` is not installed")

from rollout_server.environments import EnvironmentFailed, NoMoreTurns, Turn
from rollout_server.environments.adapters import verifiers_chat, verifiers_tasks
from scripts import prepare_verifiers

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


def rows(folder: Path, *words: str) -> list[dict[str, Any]]:
    assert prepare_verifiers.main(["sum_tasks", *words, "--out", str(folder), "--rows", "3", "--eval-rows", "2"]) == 0
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [{"prompt": row.pop("prompt"), "columns": row} for row in map(json.loads, lines)]


async def test_tasks_are_played_and_their_rewards_count(tmp_path: Path) -> None:
    row = rows(tmp_path)[0]
    assert row["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+1"}]
    client = Scripted(["3", "4"])
    async with prepared({"taskset": TASKS}):
        right = await verifiers_tasks.rollout(row, client)  # type: ignore[arg-type]
        wrong = await verifiers_tasks.rollout(row, client)  # type: ignore[arg-type]
    assert client.contexts == [row["prompt"]] * 2
    assert (right.reward, right.metrics, right.leave_out) == (2.0, {"correct": 1.0, "letters": 1.0}, [])
    assert (wrong.reward, wrong.leave_out) == (0.0, [])


async def test_seats_that_are_not_trained_stay_context(tmp_path: Path) -> None:
    row = rows(tmp_path, "--options", "{first: 5}")[0]
    client = Scripted(["7", "no", "8"])
    async with prepared(SOLVER):
        played = await verifiers_tasks.rollout(row, client)  # type: ignore[arg-type]
    assert [message["content"] for message in client.contexts[2]] == ["Add.", "7+1", "7", "Try again."]
    assert (played.reward, played.leave_out) == (2.0, [1])


async def test_no_room_ends_the_episode_and_a_fault_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = rows(tmp_path)[0]

    async def breaks(*_: Any, **__: Any) -> Turn:
        raise ValueError("the template refuses this")

    client = Scripted([])
    monkeypatch.setattr(client, "generate", breaks)
    async with prepared(SOLVER):
        with pytest.raises(NoMoreTurns, match="that was all"):
            await verifiers_tasks.rollout(row, Scripted(["1"]))  # type: ignore[arg-type]
        with pytest.raises(verifiers_tasks.TaskFailed, match="the template refuses this"):
            await verifiers_tasks.rollout(row, client)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no column `task` .* scripts\.prepare_verifiers"):
        await verifiers_tasks.rollout({"prompt": "1+1", "columns": {}}, client)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "options.taskset: None; name an installed one"),
        ({"taskset": TASKS, "task": 1}, "options.task: unknown"),
        ({"taskset": {"id": "no-such-tasks"}}, "'no-such-tasks' cannot be played: .*not found"),
        ({"taskset": {**TASKS, "last": 3}}, "'sum_tasks' cannot be played: .*last"),
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
