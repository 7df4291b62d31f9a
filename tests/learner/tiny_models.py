"""Tiny models with random weights, the configurations that train them, and policies over one gloo rank."""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from configs import Config
from configs.loading import validate
from learner.checkpoints.checkpointer import Checkpointer
from learner.optimizer import Optimizer
from learner.policy.model import Policy, build_policy
from learner.rows import Row

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_model(folder: Path, family: str = "qwen3", *, tied: bool = True, seed: int = 0, **changes: Any) -> Path:
    """Write a random model as a Hugging Face folder; returns the folder."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**SIZES, "tie_word_embeddings": tied, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the usual 0.02, and no two norms alike, so that a mistake anywhere shows in the logits.
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    return folder


def with_tokenizer(folder: Path, **changes: Any) -> Path:
    """The folder, with what identifies a tokenizer."""
    tokenizer = {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | changes))
    return folder


def make_config(model_folder: Path, **sections: dict[str, Any]) -> Config:
    """A small configuration on this model; sections are merged over it."""
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(model_folder)},
        "data": {"train": "unused.jsonl", "max_prompt_tokens": 16},
        "reward": {"function": "exact"},
        "rollout": {"group_size": 4, "groups_per_step": 4, "max_new_tokens": 16},
        "replay": {"async_lag": 2},
        "learner": {
            "total_steps": 10,
            "lr": 5e-4,
            "warmup_steps": 2,
            "max_tokens_per_microbatch": 256,
            "compile": False,  # also on a GPU, where only the tests of the compiler wait for it
        },
        "placement": {"device": "cpu", "split": "1:1"},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return validate(tree, "test")


@contextmanager
def process_group(store: Path, rank: int = 0, world_size: int = 1) -> Iterator[DeviceMesh]:
    """The default process group over gloo, found through a file; left again at the end."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def built(config: Config, mesh: DeviceMesh, device: torch.device = CPU) -> tuple[Policy, Optimizer]:
    """A policy with a fresh optimizer."""
    policy = build_policy(config, mesh, device)
    return policy, Optimizer(config.learner, policy)


def saved(keeper: Checkpointer, step: int, **given: Any) -> Path:
    """The folder of a checkpoint that was written to its end."""
    keeper.start(step, **{"replay": {}, **given})
    report = keeper.settle(wait=True)
    assert report is not None and report.step == step
    return report.folder


def row_of(sequences: Sequence[Sequence[int]]) -> Row:
    """Sequences of at least two tokens, one after the other; all but the first of each are in the loss."""
    lengths = [len(sequence) for sequence in sequences]
    starts = [0, *itertools.accumulate(lengths)]
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    kept = torch.tensor(
        [first + at for first, length in zip(starts, lengths, strict=False) for at in range(length - 1)]
    )
    nothing = torch.zeros(len(kept))
    return Row(
        input_ids=ids[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        starts=torch.tensor(starts, dtype=torch.int32),
        longest=max(lengths),
        kept=kept,
        targets=ids[kept + 1],
        behaviour_logprobs=nothing,
        advantages=nothing,
        weights=nothing,
        lags=nothing,
        lengths=torch.tensor(lengths) - 1,
        groups=torch.arange(len(lengths)),
        fresh=torch.ones(len(lengths), dtype=torch.bool),
    )


def logprobs(policy: Policy, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logprob of every token but the first of each sequence."""
    row = row_of(sequences)
    with torch.no_grad():
        found, _ = policy.forward(row.to(policy.device), 1.0)
    return list(found.split(row.lengths.tolist()))
