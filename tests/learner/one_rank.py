"""A gloo process group of one rank inside the test process, and policies over it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs import Config
from learner.model import Policy, build_policy
from learner.optimizer import Optimizer

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


def logits(policy: Policy, input_ids: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """[B, T, V] in the compute dtype; `keywords` go to the forward of the transformers model."""
    found: torch.Tensor = policy.model(input_ids=input_ids, use_cache=False, **keywords).logits
    return found
