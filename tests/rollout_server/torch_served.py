"""Torch engines for tests: one that serves, one that is stopped in the middle of an answer, and updates."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_server.engines.base import Completion, Sampling
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.engines.torch.model import TorchModel
from tests.rollout_server.torch_oracle import hf_tensors

DEADLINE_S = 60.0
PROMPT = [3, 9, 17]
LONG = Sampling(max_new_tokens=40, seed=1)
STEP = 9
"""Decode steps before the update; prefill samples one token more."""


@asynccontextmanager
async def serving(folder: Path, *, max_context: int = 64, max_running: int = 32, **rest: Any) -> AsyncIterator[Any]:
    """An engine on the folder, closed at the end."""
    engine = TorchEngine(folder, max_context=max_context, max_running=max_running, **rest)
    try:
        yield engine
    finally:
        await engine.close()


class Gate:
    """Holds the decode thread inside its `step`-th decode of the chosen weights, so that a test acts right then."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, step: int, which: Callable[[Any], bool] = lambda _: True
    ) -> None:
        self._reached, self._release, self._left = threading.Event(), threading.Event(), step
        original = TorchModel.decode

        def decode(model: TorchModel, weights: Any, *rest: Any) -> torch.Tensor:
            logits = original(model, weights, *rest)
            if which(weights):
                self._left -= 1
                if self._left == 0:
                    self._reached.set()
                    assert self._release.wait(DEADLINE_S)
            return logits

        monkeypatch.setattr(TorchModel, "decode", decode)

    async def reached(self) -> None:
        """Wait until the thread stands at the gate."""
        assert await asyncio.to_thread(self._reached.wait, DEADLINE_S)

    async def posted(self, call: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Start a call to the engine whose command the thread finds when it leaves the gate."""
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        return task

    def release(self) -> None:
        """Let the thread go on."""
        self._release.set()


Gates = Callable[..., Gate]
"""The fixture `gate_at`: a gate in the `step`-th decode."""


@asynccontextmanager
async def stopped_midway(
    folder: Path, gate_at: Gates, mode: Any, *, n: int = 3
) -> AsyncIterator[tuple[TorchEngine, "asyncio.Task[list[Completion]]", "asyncio.Task[None]"]]:
    """An engine whose live request has STEP + 1 tokens, and the pause that was asked for at that instant."""
    gate = gate_at(STEP)
    async with serving(folder) as engine:
        answers = await gate.posted(engine.generate(PROMPT, LONG, n, request_id="a"))
        await gate.reached()
        pausing = await gate.posted(engine.pause(mode))
        gate.release()
        yield engine, answers, pausing


async def sample(engine: TorchEngine, prompt: list[int], name: str, n: int = 1, **sampling: Any) -> list[Completion]:
    """Generate with the defaults of these tests."""
    return await engine.generate(prompt, Sampling(**{"max_new_tokens": 24, **sampling}), n, request_id=name)


async def update(engine: TorchEngine, model: Any, version: int, mode: Any = "keep_kv") -> None:
    """Pause, load the model as this version, go on."""
    await engine.pause(mode)
    await engine.load(hf_tensors(model).items(), version)
    await engine.resume()
