"""Dense families in SGLang on a CPU: five updates by a learner are proven live, and logprobs of both ends agree.

By default the layout alone: SGLang's own model of each family takes the learner's tensors, and digests of what it holds
are theirs.
"""

import asyncio
import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from configs.learner import Lora
from slipstream.runtime.lifeline import die_with_parent
from weight_bus.adapters import SCALE, is_adapted, names_of, scale_digest
from weight_bus.digest import add, slice_digest

if TYPE_CHECKING:
    from tests.rollout_server.sglang_served import Served

DEADLINE_S = 300.0
PROMPT_TOKENS, NEW_TOKENS, UPDATES = 24, 40, 5
PROMPT = [(5 * i + 1) % 40 + 1 for i in range(PROMPT_TOKENS)]
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"tied": False, "sliding_window": PROMPT_TOKENS + NEW_TOKENS},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "glm4": {"tied": False},
    "granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 8.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4,
    },
    "phi3": {"tied": False},
    "olmo2": {"tied": False},
    "qwen3_moe": {
        "tied": False, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
    },
    "olmoe": {"tied": False, "num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4},
}  # fmt: skip
UNCAPPED = {"gemma2": {"hidden_act": "gelu_pytorch_tanh"}}
"""SGLang's attention on a CPU leaves out caps of scores, so these are not sampled from here."""
CLASSES = {
    "gemma2": "gemma2.Gemma2ForCausalLM",
    "mistral": "mistral.MistralForCausalLM", "gemma3_text": "gemma3_causal.Gemma3ForCausalLM",
    "glm4": "glm4.Glm4ForCausalLM", "granite": "granite.GraniteForCausalLM", "phi3": "llama.Phi3ForCausalLM",
    "olmo2": "olmo2.Olmo2ForCausalLM", "qwen3_moe": "qwen3_moe.Qwen3MoeForCausalLM", "olmoe": "olmoe.OlmoeForCausalLM",
}  # fmt: skip


async def test_sglangs_own_model_of_each_family_holds_what_is_sent(served: "Served", tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from sglang.srt.distributed import parallel_state
    from transformers import AutoConfig

    from rollout_server.engines.sglang.update.live import RankWeights
    from tests.learner.tiny_models import save_model

    where = f"file://{tmp_path}/store"
    parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo", distributed_init_method=where)
    try:
        parallel_state.initialize_model_parallel(1)
        for family, changes in (FAMILIES | UNCAPPED).items():
            sent = load_file(save_model(tmp_path / family, family, **changes) / "model.safetensors")
            module, _, name = CLASSES[family].rpartition(".")
            kind = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
            live = kind(AutoConfig.from_pretrained(tmp_path / family))
            weights = RankWeights(live, [(tensor, tuple(whole.shape)) for tensor, whole in sent.items()])
            weights.load(list(sent.items()))
            assert together(weights) == {tensor: slice_digest(whole) for tensor, whole in sent.items()}, family
            held = sum(view.numel() for view in (piece.view for piece in weights.slices))
            assert held == sum(parameter.numel() for parameter in live.parameters()), "nothing else is decoded with"
            check_adapters(live, sent, family)
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


def together(weights: Any) -> dict[str, int]:
    """Digests by tensor: a fused one of the checkpoint is several blocks."""
    found = dict[str, list[int]]()
    for name, _, _, digest in weights.digests():
        found.setdefault(name, []).append(digest)
    return {name: add(parts) for name, parts in found.items()}


def check_adapters(live: Any, sent: dict[str, Any], family: str) -> None:
    """Adapters are merged into every projection that the family has, and no more is said to be held than is."""
    import torch

    from rollout_server.engines.sglang.update.adapted import AdaptedWeights
    from rollout_server.engines.sglang.update.layout import live_slices

    lora, adapters = Lora(rank=2, alpha=3.0), dict[str, torch.Tensor]()
    for name in (name for name in sent if is_adapted(name, lora.projections)):
        a, b = names_of(name)
        adapters |= {a: torch.randn(2, sent[name].shape[1]), b: torch.randn(sent[name].shape[0], 2)}
    shapes = [(name, tuple(whole.shape)) for name, whole in sent.items()]
    order = {"rank": 2, "scale": lora.scale, "projections": list(lora.projections)}
    weights = AdaptedWeights(live, shapes, order)
    weights.load(list(adapters.items()))
    expected = {name: slice_digest(whole) for name, whole in (sent | adapters).items()}
    assert together(weights) == expected | {SCALE: scale_digest(lora.scale)}, family
    for piece in live_slices(live, shapes):
        a, b = names_of(piece.name)
        whole = sent[piece.name] + (lora.scale * adapters[b] @ adapters[a] if a in adapters else 0.0)
        part = whole[
            tuple(slice(first, first + size) for first, size in zip(piece.start, piece.view.shape, strict=True))
        ]
        torch.testing.assert_close(piece.view.data, part, rtol=1e-5, atol=1e-5)


def served_by_sglang(folder: Path, family: str, ranks: int, parent: int) -> dict[str, float]:
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
        f"placement.tensor_parallel={ranks}", f"placement.split={ranks}:1",
        "algorithm.routing_replay=false",
    ])  # fmt: skip
    found = {}

    async def run(policy: Any) -> None:
        engine = SGLangEngine(config)
        try:
            for version in range(UPDATES + 1):
                if version:
                    for shard in policy.shards():
                        shard.local.add_(torch.randn_like(shard.local), alpha=0.02)
                    expected = policy.shard_digests("float32")
                    await engine.pause("keep_kv")
                    await engine.load(list(policy.named_full_tensors("float32")), version, expected)
                    assert engine.stood() is not None, "its schedulers go on by themselves"
                    assert await engine.digest() == expected, version
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
@pytest.mark.parametrize(("family", "ranks"), [*((name, 1) for name in FAMILIES), ("phi3", 2), ("qwen3_moe", 2)])
def test_updates_of_each_family_are_proven_and_both_ends_agree(tmp_path: Path, family: str, ranks: int) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(served_by_sglang, tmp_path, family, ranks, os.getpid()).result(DEADLINE_S + 20)
    print(found)
    assert len(found) == UPDATES + 1 and max(found.values()) <= 1e-4, found
