"""What a turn with a long context costs the loop that serves the engine, on which all episodes share one thread."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from configs.environment import Environment
from rollout_server.engines.base import Completion, Sampling
from rollout_server.tasks.environments.pool import environments_of
from rollout_server.tasks.environments.session import Limits, Session
from rollout_server.tasks.task import Task
from tests.rollout_server.environments.test_drift import task as task

FUNCTIONS = Path(__file__).with_name("functions.py")
CONTEXT, TURNS, EPISODES, PERIOD_S = 16_384, 40, 1024, 10.0


async def generate(ids: list[int], sampling: Sampling, n: int, **_: Any) -> list[Completion]:
    zeros = np.zeros(64, np.int32)
    return [Completion(token_ids=zeros + 7, logprobs=zeros * 0.5, versions=zeros, finish_reason="length")]


async def test_1024_episodes_leave_the_loop_to_the_engine(task: Task) -> None:
    """A turn each 10 s, at 16k tokens, by ids and by messages: below 30 % of a core."""
    engine: Any = SimpleNamespace(generate=generate, running_tokens=dict, abort=lambda _: None)
    limits = Limits(max_new_tokens=9 * CONTEXT, max_context=9 * CONTEXT, max_turns=2 * TURNS)
    shares = {}
    with ThreadPoolExecutor(1) as texts:
        environment = Environment(function=f"{FUNCTIONS}:long_contexts", workers=1, options={"tokens": CONTEXT})
        async with environments_of(environment, frozenset()) as environments:
            assert environments is not None
            for kind in ("ids", "messages"):
                sampling = Sampling(max_new_tokens=1, seed=0)
                session = Session(f"0/1/1/{kind}", engine, task, texts, sampling=sampling, limits=limits)
                start = time.thread_time()
                await environments.run({"prompt": kind, "turns": TURNS}, session)
                shares[kind] = (time.thread_time() - start) / TURNS * EPISODES / PERIOD_S
    assert max(shares.values()) < 0.3, shares
