"""Turning leases into groups: what may not happen on the event loop, and which policies a group names."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from configs import Config
from replay import messages as m
from rollout_server.engines import Completion
from rollout_server.generate import Generator
from rollout_server.leases import policies_of
from rollout_server.rewards import RewardOutcome, Sample

PROMPT = {"prompt": "3+4=", "ground_truth": "7", "data_source": "toy", "extra_info": {}, "columns": {}}
LEASE = m.Lease(pass_=0, index=0, attempt=1, min_version=0, lease_s=60.0, seed=1, prompt=PROMPT)
EVALUATION = m.EvaluationLease(version=0, greedy=True, seed=1, prompts=[PROMPT])
LIMIT_S = 5.0
CONFIG = {"model": {"path": "none"}, "data": {"train": "none.jsonl"}, "rollout": {"group_size": 2}}


class Engine:
    """Answers at once."""

    async def generate(self, token_ids: list[int], sampling: Any, n: int, **_: Any) -> list[Completion]:
        return [
            Completion(
                token_ids=np.array([7, 0], np.int32),
                logprobs=np.zeros(2, np.float32),
                versions=np.zeros(2, np.int32),
                finish_reason="stop",
            )
        ] * n


class Rewards:
    """One point for each."""

    async def score(self, samples: list[Sample]) -> list[RewardOutcome]:
        return [RewardOutcome(score=1.0, seconds=0.0) for _ in samples]


class Task:
    """A tokenizer, one call of which takes until `go_on` is set."""

    stop_token_ids = (0,)

    def __init__(self, slow: str) -> None:
        self.slow, self.reached, self.go_on = slow, threading.Event(), threading.Event()
        self.waited_in_vain = False

    def _maybe_wait(self, call: str) -> None:
        if call == self.slow:
            self.reached.set()
            self.waited_in_vain |= not self.go_on.wait(LIMIT_S)

    def encode(self, row: dict[str, Any]) -> list[int]:
        self._maybe_wait("encode")
        return [3, 4]

    def sample(self, row: dict[str, Any], token_ids: list[int], finish_reason: str) -> dict[str, Any]:
        self._maybe_wait("decode")
        return {**row, "completion": "7"}


@pytest.mark.parametrize("slow", ["encode", "decode"])
@pytest.mark.parametrize("work", [lambda g: g.group(LEASE, "0/0/1"), lambda g: g.evaluation(EVALUATION)])
def test_the_loop_goes_on_while_texts_are_encoded_and_decoded(slow: str, work: Callable[[Generator], Any]) -> None:
    """It also runs SGLang's frontend and the updates of its weights."""

    async def main() -> None:
        task = Task(slow)
        generator = Generator(Config.model_validate(CONFIG), Engine(), task, Rewards())  # type: ignore[arg-type]
        working = asyncio.create_task(work(generator))
        assert await asyncio.to_thread(task.reached.wait, LIMIT_S)
        task.go_on.set()
        done = await working
        assert not task.waited_in_vain, "the call kept the loop from setting the event"
        assert done.texts == ["7"] * len(done.texts) and set(done.rewards) == {1.0}

    asyncio.run(asyncio.wait_for(main(), 3 * LIMIT_S))


@pytest.mark.parametrize(
    ("versions", "served", "policies"),
    [
        ([4, 4], [(1, 4)], [[1, 4]]),
        ([4, 6], [(1, 4), (1, 5), (2, 5), (2, 6)], [[1, 4], [2, 6]]),
        ([5], [(1, 4), (1, 5), (2, 5), (2, 6)], [[1, 5], [2, 5]]),  # either may have sampled it
        ([3, 5], [(1, 5), (2, 6)], [[1, 3], [1, 5]]),  # a prefix is of the incarnation at the lease
    ],
)
def test_a_group_names_the_policies_that_were_live_while_it_ran(
    versions: list[int], served: list[tuple[int, int]], policies: list[list[int]]
) -> None:
    assert policies_of(np.array(versions, np.int32), served) == policies
