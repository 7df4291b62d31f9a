"""SGLang about pictures: its logprobs are transformers', whatever becomes of a request on its way.

Each fails without our places and positions (`image_data` in engines/sglang/process.py): SGLang would look for pictures
among sampled tokens, and has no positions for the answer of a request that it retracts.
"""

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from slipstream.runtime.lifeline import die_with_parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        __import__("importlib.util").util.find_spec("sglang") is None, reason="needs the extra sglang-cpu"
    ),
]
DEADLINE_S = 300.0
TOKENS = 96


def errors(folder: Path, family: str, parent: int) -> dict[str, float]:
    """Largest difference of logprobs from transformers', by what became of the requests; in a process of its own."""
    from rollout_server.engines.sglang.cpu import prepare_cpu

    os.environ.update(SGLANG_TEST_RETRACT="1", SGLANG_TEST_RETRACT_INTERVAL="7", SGLANG_TEST_RETRACT_NO_PREFILL_BS="64")
    die_with_parent(parent)
    prepare_cpu()
    import torch
    from safetensors.torch import load_file

    from configs.loading import load
    from rollout_server.engines.base import Completion, Sampling
    from rollout_server.engines.sglang.engine import SGLangEngine
    from rollout_server.tasks.pictures import Prompt
    from tests.rollout_server.test_picture_prompts import ODD, given, prompts_in, reference

    torch.set_num_threads(1)
    prompts = prompts_in(folder, 3, family=family, patch=14 if family == "qwen2_5_vl" else 4)
    settings = ["rollout.engine=sglang", f"model.path={folder / 'model'}", "data.max_prompt_tokens=200"]
    settings += [f"rollout.max_new_tokens={TOKENS}", "rollout.max_running=8", "rollout.engine_deadline_s=30"]
    weights = load_file(str(folder / "model" / "model.safetensors"))
    sampling = Sampling(max_new_tokens=TOKENS)

    def off(prompt: Prompt, answer: Completion, known: int = 0) -> float:
        wanted = reference(folder / "model", prompt, answer)
        return float((torch.from_numpy(answer.logprobs) - wanted)[known:].abs().max())

    async def run() -> dict[str, float]:
        engine = SGLangEngine(load("quickstart", settings))
        try:
            asked = [
                engine.generate(p.token_ids, sampling, 2, request_id=str(i), **given(p)) for i, p in enumerate(prompts)
            ]
            running = asyncio.gather(*asked)
            while sum(engine.running_tokens().values()) < 32:
                assert not running.done(), "ended before the update"
                await asyncio.sleep(0.002)
            await engine.pause("recompute_kv")
            await engine.load([(n, t) for n, t in weights.items() if not n.startswith("visual.")], 1)
            await engine.resume()
            answers = await running
            versions = {int(version) for two in answers for answer in two for version in answer.versions}
            assert versions == {0, 1}, "some tokens are older than the update, and some newer"
            first = prompts[0]
            odd = await engine.generate(
                first.token_ids, sampling, 2, request_id="odd", prefixes=[ODD, ODD], **given(first)
            )
        finally:
            await engine.close()
        pairs = zip(prompts, answers, strict=True)
        return {
            "recomputed": max(off(prompt, answer) for prompt, two in pairs for answer in two),
            "odd": max(off(first, answer, ODD.token_ids.size) for answer in odd),
        }

    return asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_requests_with_pictures_that_are_retracted_recomputed_or_continued(tmp_path: Path, family: str) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(errors, tmp_path, family, os.getpid()).result(DEADLINE_S + 20)
    print(found)
    assert np.array(list(found.values())).max() < 1e-4
