"""The budget of a learner GPU and of its host memory against what a step with critic and reference model takes."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from configs.loading import validate
from examples.random_qwen3 import write_weights
from learner.beside.beside import build_beside
from learner.checkpoints.parts import HostMemory, Part, tensors_of
from learner.optimizer import Optimizer
from learner.policy.memory import GIB, Setup, host_items_of
from learner.policy.model import build_policy, choose_for
from learner.policy.pretrained import read_config
from learner.step import take_peak_bytes
from learner.trainer import Trainer
from scripts.bench.learner import batch_of
from tests.gpu.test_learner_cuda import GPU, mesh, pytestmark  # noqa: F401

TOKENS = 8192
CASES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "offloaded moments": {"offload_optimizer": True},
    "adapters": {"lora": {"rank": 16}},
}


@pytest.mark.parametrize("case", CASES)
def test_the_budget_of_ppo_is_above_the_peak_and_near(case: str, mesh: DeviceMesh, tmp_path: Path) -> None:  # noqa: F811
    write_weights(tmp_path, "0.6B", 0)
    lengths = torch.randint(256, 1024, (64,), generator=torch.Generator().manual_seed(0)).int().numpy()
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(tmp_path)},
        "data": {"train": "unused.jsonl", "max_prompt_tokens": 256},
        "rollout": {"max_new_tokens": 1024, "group_size": 8, "groups_per_step": 8},
        "algorithm": {"advantage": "gae", "kl": "k3", "kl_coef": 0.01},
        "learner": {"max_tokens_per_microbatch": TOKENS, "lr": 1e-6, **CASES[case]},
        "weight_bus": {"backend": "gloo"},
        "placement": {"device": "cuda", "split": "1:1"},
    }
    config = validate(tree, "test")
    gc.collect()  # or what the case before has left would be freed in this one
    setup = Setup.of(config, read_config(tmp_path).to_dict())
    budget, before = choose_for(setup, mesh, GPU), torch.cuda.memory_allocated(GPU)
    policy = build_policy(config, mesh, GPU, budget)
    optimizer = Optimizer(config.learner, policy)
    trainer = Trainer(config, policy, optimizer, beside=build_beside(config, policy))
    batch = batch_of(lengths, 256, config.learner, policy.vocab_size)
    trainer.train_step(batch)
    take_peak_bytes(GPU)
    sums = trainer.train_step(batch).sums
    peak = max(int(sums.values["peak_bytes_max"]), take_peak_bytes(GPU)) - before
    memory, pinned = HostMemory(), pinned_bytes()
    memory.copy(tensors_of(Part(policy, optimizer)))
    pinned = pinned_bytes() - pinned
    copies = host_items_of(setup, budget)["copy for checkpoints"]
    print(f"{case}: {peak / GIB:.2f} GiB, the budget has {budget.total / GIB:.2f}: {budget.items}")
    print(f"{case}: {pinned / GIB:.3f} GiB pinned for a checkpoint, the budget has {copies / GIB:.3f}")
    assert peak <= budget.total <= 1.1 * peak
    assert pinned <= copies <= 1.1 * pinned


def pinned_bytes() -> int:
    """In use now, as torch's allocator has rounded them; torch 2.11 has them under another name."""
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("active_bytes.current", stats["allocated_bytes.current"]))
