"""Turns of many episodes on an engine with few places: what waits is no fault of the environment."""

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_server.engines.base import Completion, Sampling
from rollout_server.engines.torch.engine import TorchEngine
from tests.rollout_server.environments.test_episodes import GROUP, ending_of, lease, playing

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
