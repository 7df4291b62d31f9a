"""Twenty updates of a real SGLang under load: its logprobs are those of the weights that it claims to have used."""

import asyncio
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from sglang_served import NEW_TOKENS, TOLERANCE, Served, check_logprobs, digests, random_model, staged
from torch_oracle import logprobs_of, logprobs_over_kept_kv

from rollout_server.engines.base import Completion

UPDATES = 20
RUNNING = 4
VOCABULARY = 40
PREFIX = [random.Random(1).randrange(VOCABULARY) for _ in range(32)]
"""What all prompts begin with."""


class Load:
    """Requests that share a prefix, RUNNING of them at any time, until it is stopped."""

    def __init__(self, served: Served, rng: random.Random) -> None:
        self.served = served
        self.rng = rng
        self.answers: list[tuple[list[int], Completion]] = []
        self.running: set[asyncio.Task[Any]] = set()
        self._stopping = False
        self._workers = [asyncio.ensure_future(self._work()) for _ in range(RUNNING)]

    async def _work(self) -> None:
        while not self._stopping:
            prompt = PREFIX + [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(4))]
            task = self.served.start_sample(prompt, max_new_tokens=self.rng.randrange(NEW_TOKENS // 2, NEW_TOKENS))
            self.running.add(task)
            self.answers += [(prompt, answer) for answer in await task]
            self.running.discard(task)

    async def under_way(self) -> None:
        """Wait until one of the requests shows a token."""
        while not any(self.served.engine.running_tokens().get(task.get_name()) for task in self.running):
            for worker in self._workers:
                assert not worker.done(), worker
            await asyncio.sleep(0.002)

    async def stop(self) -> None:
        """Let the running ones end."""
        self._stopping = True
        await asyncio.gather(*self._workers)


async def update_under_load(served: Served, load: Load, mode: str) -> tuple[Any, list[tuple[list[int], Completion]]]:
    """One update; the new model, and answers to requests that came while the engine was paused or after that."""
    await load.under_way()
    model = random_model(load.rng.randrange(2**32))
    await served.engine.pause(mode)
    came_early = served.start_sample(PREFIX)
    await served.engine.load(staged(model), served.version + 1)
    assert await served.engine.digest() == digests(model)
    await served.engine.resume()
    served.model, served.version = model, served.engine.version
    longer = [*PREFIX, load.rng.randrange(VOCABULARY)]
    first, again = await asyncio.gather(served.sample(longer, 2), served.sample(PREFIX, 2))
    extended = longer + first[0].token_ids.tolist()
    fresh = [(PREFIX, await came_early), (longer, first), (PREFIX, again), (extended, await served.sample(extended))]
    return model, [(prompt, answer) for prompt, answers in fresh for answer in answers]


def check_versions(answer: Completion) -> list[int]:
    """The versions of an answer, oldest first; they never go back."""
    assert (np.diff(answer.versions) >= 0).all() and answer.finish_reason == "length"
    return sorted(set(answer.versions.tolist()))


def check_in_flight(mode: str, models: dict[int, Any], prompt: list[int], answer: Completion) -> None:
    """What each mode promises of answers that an update may have met."""
    versions = check_versions(answer)
    check_logprobs(models[versions[0]], prompt, answer, versions[0])
    if mode == "recompute_kv":
        for version in versions:
            check_logprobs(models[version], prompt, answer, version)
    elif mode == "drain":
        assert len(versions) == 1
    elif len(versions) == 2:
        check_kept_kv(*(models[version] for version in versions), prompt, answer)


def check_kept_kv(old: Any, new: Any, prompt: list[int], answer: Completion) -> None:
    """Of keep_kv: the new weights read the KV that the old ones made."""
    first_new = int((answer.versions == answer.versions[0]).sum())
    found = torch.from_numpy(answer.logprobs)[first_new:]
    kept = logprobs_over_kept_kv(old, new, prompt, answer, first_new)
    # a request that had shown no token yet starts anew, with the tokens that were on their way
    anew = logprobs_of(new, prompt, answer)[first_new:]
    off = min(float((found - expected).abs().max()) for expected in (kept, anew))
    assert off <= TOLERANCE, f"{len(found)} tokens over kept KV are off by up to {off:.2g}"


@pytest.mark.parametrize("mode", ["keep_kv", "recompute_kv", "drain"])
async def test_logprobs_are_those_of_the_claimed_weights_over_20_updates(served: Served, mode: str) -> None:
    load = Load(served, random.Random(mode))
    models = {served.version: served.model}
    served.cached.clear()
    for _ in range(UPDATES):
        model, fresh = await update_under_load(served, load, mode)
        models[served.version] = model
        for prompt, answer in fresh:
            assert check_versions(answer) == [served.version]
            check_logprobs(model, prompt, answer)
    await load.stop()
    for prompt, answer in load.answers:
        check_in_flight(mode, models, prompt, answer)
    cut = {pair for _, answer in load.answers for pair in itertools.pairwise(check_versions(answer))}
    assert len(cut) >= (0 if mode == "drain" else UPDATES // 2), "updates hardly met running requests"
    assert sum(tokens >= len(PREFIX) - 1 for tokens in served.cached) >= UPDATES, "the prefix cache was hardly used"
