"""Routed experts of SGLang on a CPU: those that transformers' router chooses, and updates of fused experts proven."""

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.runtime.lifeline import die_with_parent

DEADLINE_S = 300.0
PROMPT = [(5 * i + 1) % 39 + 1 for i in range(20)]
ENDED, RUNNING = 40, 9
"""Tokens of two prefixes; an answer has 40."""


def served(folder: Path, ranks: int, parent: int) -> tuple[list[float], list[float]]:
    """By answer: share of equal decisions, and the largest difference of logprobs; in a process of its own."""
    from rollout_server.engines.sglang.cpu import prepare_cpu

    die_with_parent(parent)
    prepare_cpu()
    import numpy as np
    import torch

    from configs.loading import load
    from rollout_server.engines.base import Partial, Sampling
    from rollout_server.engines.sglang.engine import SGLangEngine
    from tests.rollout_server.test_torch_routing import routing_of
    from tests.rollout_server.torch_oracle import VARIANTS, error, hf_tensors, logprobs_of, make_model, save_folder
    from weight_bus.digest import slice_digest

    torch.set_num_threads(1)
    # widths that SGLang need not pad on a CPU; it has an output head of its own in any mixture
    shape = {
        **VARIANTS["qwen3-moe"],
        "num_experts": 8,
        "moe_intermediate_size": 32 * ranks,
        "tie_word_embeddings": False,
    }
    model = save_folder(folder / "model", **shape)
    config = load("quickstart", [
        "rollout.engine=sglang", f"model.path={model}", "data.max_prompt_tokens=40", "rollout.max_new_tokens=80",
        "rollout.max_running=8", "rollout.engine_deadline_s=60", "rollout.sglang.disable_radix_cache=false",
        f"placement.tensor_parallel={ranks}", f"placement.split={ranks}:1",
    ])  # fmt: skip
    equal, off = list[float](), list[float]()

    async def run() -> None:
        engine = SGLangEngine(config)
        try:
            for version in range(2):
                now = make_model(seed=version, **shape)
                if version:
                    tensors = hf_tensors(now)
                    await engine.pause("recompute_kv")
                    await engine.load(list(tensors.items()), version)
                    assert await engine.digest() == {name: slice_digest(tensor) for name, tensor in tensors.items()}
                    await engine.resume()
                given = Sampling(max_new_tokens=ENDED, seed=version)
                answers = await engine.generate(PROMPT, given, 3, request_id=f"{version}")
                one = answers[0]
                prefixes = [Partial.of(one), replace(Partial.of(one.first(RUNNING)), finish_reason=None)]
                answers += await engine.generate(PROMPT, given, 2, request_id=f"{version}+", prefixes=prefixes)
                for answer in answers:
                    assert answer.routing is not None and len(answer.token_ids) == ENDED
                    expected, found = routing_of(now, PROMPT, answer), answer.routing
                    equal.append(float((np.sort(found, -1) == np.sort(expected, -1)).mean()))
                    off.append(error(answer, logprobs_of(now, PROMPT, answer)))
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
    return equal, off


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [1, 2])
def test_routed_experts_are_those_of_the_router_and_updates_of_experts_are_proven(tmp_path: Path, ranks: int) -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        equal, off = pool.submit(served, tmp_path, ranks, os.getpid()).result(timeout=DEADLINE_S + 60)
    print(equal, off)
    assert equal == [1.0] * 10 and max(off) <= 1e-4
