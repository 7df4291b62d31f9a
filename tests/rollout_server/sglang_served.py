"""What a scenario works with: a running SGLang, the weights that it was given, and the forward to compare with."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from configs.loading import load
from rollout_server.engines.base import Completion, EngineError, Sampling
from scripts.bench.server import make_engine
from tests.rollout_server.torch_oracle import hf_tensors, logprobs_of, make_model, save_folder
from weight_bus.digest import slice_digest
from weight_bus.packing import Packer
from weight_bus.staging import view_of

T = TypeVar("T")
DEADLINE_S = 300.0
PROMPT_TOKENS, NEW_TOKENS = 96, 96
SHAPE = {"max_position_embeddings": PROMPT_TOKENS + NEW_TOKENS, "intermediate_size": 64}
"""Of the tiny Qwen3. On a CPU, SGLang pads projections that are no multiple of 32 wide, which no update could fill."""
BUCKET_BYTES = 16 * 1024
TOLERANCE = 1e-4


class Served:
    """A running engine, its event loop, and the weights that it was given last."""

    def __init__(self, folder: Path) -> None:
        self.folder = save_folder(folder, **SHAPE)
        self.loop = asyncio.new_event_loop()
        self.engine: Any = None
        self.model: Any = None
        self.version = 0
        self.cached: list[int] = []
        """Tokens of each prompt that the prefix cache had, request by request."""
        self._names = 0

    def config(self, *overrides: str) -> Any:
        """The quick start's configuration with SGLang and the tiny model."""
        return load(
            "quickstart",
            [
                "rollout.engine=sglang",
                f"model.path={self.folder}",
                f"data.max_prompt_tokens={PROMPT_TOKENS}",
                f"rollout.max_new_tokens={NEW_TOKENS}",
                "rollout.max_running=32",
                "rollout.engine_deadline_s=30",
                "rollout.sglang={disable_radix_cache: false, disable_overlap_schedule: false}",  # as on GPUs
                *overrides,
            ],
        )

    def start(self) -> None:
        """Start an engine on version 0, where none runs or a test has killed it."""
        if self.engine is not None and self._is_dead():
            self.close()
        if self.engine is None:
            self.engine = self.run(self._start())
            self.model, self.version = random_model(0), 0

    async def _start(self) -> Any:
        engine: Any = make_engine(self.config())  # as benchmarks have it: SGLang's engine, and a probe
        generate = engine.sglang.generate

        async def recorded(*args: Any, **kwargs: Any) -> AsyncIterator[dict[str, Any]]:
            output: dict[str, Any] = {}
            async for output in generate(*args, **kwargs):
                yield output
            self.cached.append(int(output["meta_info"].get("cached_tokens") or 0))

        engine.sglang.generate = recorded
        return engine

    def _is_dead(self) -> bool:
        try:
            self.run(self.engine.health())
        except EngineError:
            return True
        return False

    def close(self) -> None:
        """End the engine; `start` makes another one."""
        if self.engine is not None:
            self.run(self.engine.close())
            self.engine = None

    def run(self, main: Awaitable[T]) -> T:
        """Run a test's coroutine on the loop of the engine, under a deadline."""
        return self.loop.run_until_complete(asyncio.wait_for(main, DEADLINE_S))

    async def update(self, seed: int, mode: str, *, version: int | None = None) -> Any:
        """Pause, load random changes as the next version, compare live digests, go on; the new model."""
        model = random_model(seed)
        await self.engine.pause(mode)
        await self.engine.load(staged(model), self.version + 1 if version is None else version, digests(model))
        assert await self.engine.digest() == digests(model)
        await self.engine.resume()
        self.model, self.version = model, self.engine.version
        return model

    def start_sample(self, prompt: list[int], n: int = 1, **sampling: Any) -> "asyncio.Task[list[Completion]]":
        self._names += 1
        request = Sampling(**{"max_new_tokens": 12, **sampling})
        name = f"request-{self._names}"
        return self.loop.create_task(self.engine.generate(prompt, request, n, request_id=name), name=name)

    async def sample(self, prompt: list[int], n: int = 1, **sampling: Any) -> list[Completion]:
        return await self.start_sample(prompt, n, **sampling)

    async def under_way(self, task: "asyncio.Task[Any]") -> None:
        """Wait until the engine has shown tokens of each answer of this request."""
        while not (begun := self.engine.progress(task.get_name())) or not all(len(one.token_ids) for one in begun):
            assert not task.done(), f"ended before it could be watched: {task}"
            await asyncio.sleep(0.002)


def random_model(seed: int) -> Any:
    """A Qwen3 like the one in the folder, which is seed 0."""
    return make_model(seed=seed, **SHAPE)


def digests(model: Any) -> dict[str, int]:
    return {name: slice_digest(tensor) for name, tensor in hf_tensors(model).items()}


def staged(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The update as the weight bus hands it over: views into the buckets that were received."""
    manifest, buckets = Packer(BUCKET_BYTES).pack(hf_tensors(model).items(), 0)
    for entry in manifest.entries:
        yield entry.name, view_of(buckets, entry)


def check_logprobs(model: Any, prompt: list[int], answer: Completion, version: int | None = None) -> None:
    """The logprobs of an answer, or of one version's tokens of it, are those of a forward of the model."""
    chosen = np.flatnonzero(answer.versions == version) if version is not None else np.arange(len(answer.token_ids))
    off = np.abs(answer.logprobs - logprobs_of(model, prompt, answer).numpy())[chosen]
    of_version = "" if version is None else f" of version {version}"
    assert off.max(initial=0.0) <= TOLERANCE, f"logprobs{of_version} are off by up to {off.max():.2g}"
