"""Routing replay on a GPU: decisions and logprobs of a mixture in SGLang and in the learner, both in bfloat16.

`python -m pytest -s tests/gpu/test_routing_cuda.py` prints the share of decisions that differ, and differences of
logprobs, with the engine's experts and with the router's own.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import Config
from examples.random_qwen3 import SHAPES, write_weights
from learner.policy.model import Policy, build_policy
from rollout_server.engines.base import Completion, Sampling
from tests.gpu.test_moe_cuda import mesh as mesh
from tests.gpu.test_sglang_cuda import started
from tests.learner.tiny_models import row_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
GPU = torch.device("cuda", 0)
PROMPTS, ANSWERS, TOKENS = 8, 8, 512
SHAPE = "3B-A0.6B"


async def sampled(config: Config) -> list[tuple[list[int], Completion]]:
    prompts = np.random.default_rng(0).integers(3, SHAPES[SHAPE]["vocab_size"], (PROMPTS, 64)).tolist()
    async with started(config) as engine:
        given = Sampling(max_new_tokens=TOKENS)
        calls = (engine.generate(prompt, given, ANSWERS, request_id=str(i)) for i, prompt in enumerate(prompts))
        found = await asyncio.gather(*calls)
    return [(prompt, answer) for prompt, answers in zip(prompts, found, strict=True) for answer in answers]


@torch.no_grad()
def compared(
    policy: Policy, prompt: list[int], answer: Completion, *, replayed: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """|difference| of the logprobs of an answer; share of its choices, and of its routers, that decide otherwise."""
    assert answer.routing is not None and policy.mixtures is not None
    row = row_of([prompt + answer.token_ids.tolist()])
    rows = torch.from_numpy(np.concatenate([answer.routing, answer.routing[-1:]]))
    policy.mixtures.records = True
    ours = policy.forward(replace(row, routing=rows if replayed else None).to(GPU), 1.0)[0]
    chosen = policy.mixtures.chosen.cpu()[:-1]
    differs = (chosen[:, :, :, None] != rows[:-1].long()[:, :, None, :]).all(-1).float()
    shares = np.array([float(differs.mean()), float(differs.amax(-1).mean())])
    return np.abs(ours[len(prompt) - 1 :].cpu().numpy() - answer.logprobs), shares


def test_replayed_routing_brings_the_learner_to_the_engine(tmp_path: Path, mesh: DeviceMesh) -> None:
    write_weights(tmp_path / "model", SHAPE, 0)
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path / "model")},
            "data": {"train": "unused", "max_prompt_tokens": 64},
            "rollout": {
                "engine": "sglang",
                "dtype": "bfloat16",
                "max_new_tokens": TOKENS,
                "sglang": {"attention_backend": "triton", "mem_fraction_static": 0.3},
            },
            "reward": {"function": "exact"},
            "learner": {"compute_dtype": "bfloat16", "compile": False},
            "placement": {"device": "cuda", "split": "1:1", "share_gpus": True},
        }
    )
    answers = asyncio.run(sampled(config))
    policy = build_policy(config, mesh, GPU)
    found = {}
    for replayed in (False, True):
        pairs = [compared(policy, prompt, answer, replayed=replayed) for prompt, answer in answers]
        off = np.concatenate([one for one, _ in pairs])
        found[replayed] = (*np.mean([shares for _, shares in pairs], axis=0), off.mean(), np.quantile(off, 0.99))
    first = answers[0][1]
    assert first.routing is not None
    print({"bytes a token": first.routing[0].nbytes, "tokens": sum(a.token_ids.size for _, a in answers)})
    for replayed, (share, routers, mean, p99) in found.items():
        differ = f"{share:.2%} of choices differ, in {routers:.2%} of routers"
        print(f"replayed {replayed}: {differ}; |logprob difference| mean {mean:.5f}, p99 {p99:.5f}")
    assert found[True][0] == 0.0 and found[False][0] > 0.0
    assert found[True][2] < found[False][2] and found[True][3] < found[False][3]
