"""This process's place among the learner's ranks (torchrun's environment) and its process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.schema import Config


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank, world size, device and the mesh that FSDP2 shards over."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_first(self) -> bool:
        """Rank 0 talks to people: metrics, evaluations, the weight bus."""
        return self.rank == 0


@contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the learner's process group; leave it at the end.

    Raises:
        RuntimeError: torchrun started another number of ranks than the placement says.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != config.num_learner_ranks:
        raise RuntimeError(
            f"torchrun started {world_size} ranks, the placement has {config.num_learner_ranks} learner devices;"
            f" start with --nproc-per-node {config.num_learner_ranks} or change placement.split"
        )
    cuda = config.placement.device == "cuda" or (config.placement.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise RuntimeError("placement.device: 'cuda', but torch finds no GPU here; take 'cpu' or 'auto'")
    if not cuda:
        torch.set_num_threads(config.learner.num_threads)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    for name, default in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, default)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=config.learner.batch_deadline_s))
    yield Ranks(rank, world_size, device, init_device_mesh(device.type, (world_size,)))
    # Only after a good run: with a peer inside a collective this would wait for it.
    dist.destroy_process_group()
