"""Dense families in SGLang on a CPU: five updates by a learner are proven live, and logprobs of both ends agree.

By default the layout alone: SGLang's own model of each family takes the learner's tensors, and digests of what it holds
are theirs.
"""

import asyncio
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slipstream.runtime.lifeline import die_with_parent

DEADLINE_S = 300.0
PROMPT_TOKENS, NEW_TOKENS, UPDATES = 24, 40, 5
PROMPT = [(5 * i + 1) % 40 + 1 for i in range(PROMPT_TOKENS)]
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"tied": False, "sliding_window": PROMPT_TOKENS + NEW_TOKENS},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {"tied": False},
    "granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 0.4, "residual_multiplier": 0.7, "attention_multiplier": 0.4,
    },
    "phi3": {"tied": False},
    "olmo2": {"tied": False},
}  # fmt: skip


def served(folder: Path, family: str, parent: int) -> dict[str, float]:
    """Largest difference of logprobs by version, in a process of its own."""
    from rollout_server.engines.sglang.cpu import prepare_cpu

    die_with_parent(parent)
    prepare_cpu()
    import torch

    from configs.loading import load
    from learner.policy.model import build_policy
    from rollout_server.engines.base import Sampling
    from rollout_server.engines.sglang.engine import SGLangEngine
    from tests.learner.tiny_models import logprobs, process_group, save_model

    torch.set_num_threads(1)
    model = save_model(folder / "model", family, max_position_embeddings=PROMPT_TOKENS + NEW_TOKENS, **FAMILIES[family])
    config = load("quickstart", [
        "rollout.engine=sglang", f"model.path={model}", f"data.max_prompt_tokens={PROMPT_TOKENS}",
        f"rollout.max_new_tokens={NEW_TOKENS}", "rollout.max_running=8", "rollout.engine_deadline_s=30",
    ])  # fmt: skip
    found = {}

    async def run(policy: Any) -> None:
        engine = SGLangEngine(config)
        try:
            for version in range(UPDATES + 1):
                if version:
                    for shard in policy.shards():
                        shard.local.add_(torch.randn_like(shard.local), alpha=0.02)
                    await engine.pause("recompute_kv")
                    await engine.load(list(policy.named_full_tensors("float32")), version)
                    assert await engine.digest() == policy.shard_digests("float32"), version
                    await engine.resume()
                (answer,) = await engine.generate(
                    PROMPT, Sampling(max_new_tokens=NEW_TOKENS), 1, request_id=f"{version}"
                )
                assert set(answer.versions) == {version} and len(answer.token_ids) > 20
                (ours,) = logprobs(policy, [PROMPT + answer.token_ids.tolist()])
                off = torch.from_numpy(answer.logprobs) - ours[PROMPT_TOKENS - 1 :]
                found[f"version {version}"] = float(off.abs().max())
        finally:
            await engine.close()

    with process_group(folder / "store") as mesh:
        policy = build_policy(config, mesh, torch.device("cpu"))
        asyncio.run(asyncio.wait_for(run(policy), DEADLINE_S))
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", FAMILIES)
def test_updates_of_each_family_are_proven_and_both_ends_agree(tmp_path: Path, family: str) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(served, tmp_path, family, os.getpid()).result(DEADLINE_S + 20)
    print(found)
    assert len(found) == UPDATES + 1 and max(found.values()) <= 1e-4, found
