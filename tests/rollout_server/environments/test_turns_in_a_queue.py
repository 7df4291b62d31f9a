"""Turns of many episodes on an engine with few places, and what turns cost the loop that serves the engine."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from configs.environment import Environment
from configs.variants import Choice
from rollout_server.engines.base import Completion, Sampling
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.tasks.environments.pool import environments_of
from rollout_server.tasks.environments.session import EpisodeLimits, Session
from rollout_server.tasks.task import Task
from tests.rollout_server.environments.test_drift import task as task
from tests.rollout_server.environments.test_episodes import FUNCTIONS, GROUP, ending_of, lease, playing

TOKENS, TOKEN_S = 12, 0.1


class Queue:
    """Two requests run at once, a token each 100 ms; `stuck` ones never get a second one."""

    def __init__(self, *, stuck: bool = False) -> None:
        self._places, self._counts, self._stuck = asyncio.Semaphore(2), dict[str, int](), stuck

    async def generate(self, _: Any, ids: list[int], sampling: Sampling, n: int, **keys: Any) -> list[Completion]:
        name = keys["request_id"]
        self._counts[name] = 0
        try:
            async with self._places:
                for _number in range(TOKENS):
                    await asyncio.sleep(600 if self._stuck and self._counts[name] else TOKEN_S)
                    self._counts[name] += 1
        finally:
            del self._counts[name]
        zeros = np.zeros(TOKENS, np.int32)
        return [Completion(token_ids=zeros + 7, logprobs=zeros * 0.5, versions=zeros, finish_reason="length")] * n

    def install(self, patch: pytest.MonkeyPatch) -> None:
        async def generate(engine: Any, *given: Any, **keys: Any) -> list[Completion]:
            return await self.generate(engine, *given, **keys)

        patch.setattr(TorchEngine, "generate", generate)
        patch.setattr(TorchEngine, "running_tokens", lambda _: dict(self._counts))


async def test_six_episodes_on_two_places_all_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for up to twice as long as a turn may stand still."""
    Queue().install(monkeypatch)
    async with playing(folder, "last_answer", turn_timeout_s=1.0) as generator:
        found = await asyncio.gather(*(ending_of(generator, lease(index), f"0/{index}/1") for index in range(2)))
    assert found == ["", ""] and 2 * GROUP == 6


async def test_a_turn_without_progress_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Queue(stuck=True).install(monkeypatch)
    async with playing(folder, "last_answer", turn_timeout_s=0.4) as generator:
        start = time.monotonic()
        assert await ending_of(generator, lease(), "0/1/1") == "environment_error"
    assert 0.4 <= time.monotonic() - start < 4.0


CONTEXT, TURNS, EPISODES, PERIOD_S = 16_384, 40, 1024, 10.0


async def answered(ids: list[int], sampling: Sampling, n: int, **_: Any) -> list[Completion]:
    zeros = np.zeros(64, np.int32)
    return [Completion(token_ids=zeros + 7, logprobs=zeros * 0.5, versions=zeros, finish_reason="length")]


async def test_1024_episodes_leave_the_loop_to_the_engine(task: Task) -> None:
    """A turn each 10 s, at 16k tokens, by ids and by messages: below 30 % of a core."""
    engine: Any = SimpleNamespace(generate=answered, running_tokens=dict, abort=lambda _: None)
    limits = EpisodeLimits(max_new_tokens=9 * CONTEXT, max_context=9 * CONTEXT, max_turns=2 * TURNS)
    shares = {}
    with ThreadPoolExecutor(1) as texts:
        environment = Environment(function=Choice(f"{FUNCTIONS}:long_contexts", {"tokens": CONTEXT}), workers=1)
        async with environments_of(environment, frozenset()) as environments:
            assert environments is not None
            for kind in ("ids", "messages"):
                sampling = Sampling(max_new_tokens=1, seed=0)
                session = Session(f"0/1/1/{kind}", engine, task, texts, sampling=sampling, limits=limits)
                start = time.thread_time()
                await environments.run({"prompt": kind, "turns": TURNS}, session)
                shares[kind] = (time.thread_time() - start) / TURNS * EPISODES / PERIOD_S
    assert max(shares.values()) < 0.3, shares
