"""A gloo process group of one rank inside the test process, and policies over it."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs import Config
from learner.model import Policy, build_policy
from learner.optimizer import Optimizer
from learner.rows import Row

CPU = torch.device("cpu")


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
    )


def logprobs(policy: Policy, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logprob of every token but the first of each sequence."""
    row = row_of(sequences)
    with torch.no_grad():
        found, _ = policy.forward(row.to(policy.device), 1.0)
    return list(found.split(row.lengths.tolist()))
