"""This process's place among the learner's ranks and its process group, on one node or several.

Everything about the place comes from the environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as
torchrun has them); without it the process is the only rank. SLIPSTREAM_GENERATION keeps the ranks of one start of the
learner apart from what is left of an earlier one.
"""

import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from configs.errors import SlipstreamError, Unexpected
from configs.machine import DETERMINISTIC
from configs.schema import Config
from learner.collectives import AFTER_S, CollectiveFailed, CollectiveTimedOut
from learner.policy.meshes import Meshes, make_meshes
from replay.channel.interfaces import bind_collectives
from slipstream.runtime import ending
from slipstream.runtime.hang import expired
from weight_bus.transports import set_nccl_defaults

log = logging.getLogger(__name__)


class RanksError(SlipstreamError, RuntimeError, code="SLIP-LEARN-05"):
    """This process cannot take its place; the message says what does not fit."""


MEET_S = 0.05
TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
"""In what gloo and NCCL say of a collective that did not end in time."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank, world size, device and the mesh that the model is divided over."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh | Meshes

    def agree(self, *values: int) -> list[int]:
        """Rank 0's values, broadcast to all ranks (a collective)."""
        agreed = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.broadcast(agreed, group=self.mesh.get_group(), group_src=0)
        return [int(value) for value in agreed]

    @property
    def is_first(self) -> bool:
        """Rank 0 talks to people: metrics, evaluations, the weight bus."""
        return self.rank == 0


@contextmanager
def join_ranks(config: Config) -> Iterator[Ranks]:
    """Join the learner's process group; leave it at the end.

    Raises:
        RanksError: another number of ranks was started than the placement says, or there is no such GPU.
        CollectiveTimedOut: the others do not come within placement.give_up_after_s.
        InterfaceError: network.host is no address of this machine.
    """
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world_size != config.num_learner_ranks:
        raise RanksError(
            f"WORLD_SIZE is {world_size}, the placement has {config.num_learner_ranks} learner devices; start as many"
            " ranks on all learner nodes together, or change placement"
        )
    device = device_of(config)
    set_deterministic(config.learner.deterministic)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        set_nccl_defaults(config.weight_bus)  # read once, at the first group of a process: this one
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that learner/collectives.py reads
    else:
        torch.set_num_threads(config.learner.num_threads)
    bind_collectives(os.environ, config.network.host)
    timeout = timedelta(seconds=config.learner.collective_deadline_s + (AFTER_S if device.type == "cuda" else 0))
    store = meet(rank, world_size, config.placement.give_up_after_s)
    store.set_timeout(timeout)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    yield Ranks(rank, world_size, device, make_meshes(config.learner.mesh, device, timeout))
    # Only after a good run: with a peer inside a collective this would wait for it.
    dist.destroy_process_group()


def meet(rank: int, world_size: int, limit_s: float) -> Store:
    """Find the other ranks of this start in a store that rank 0 serves.

    Raises:
        CollectiveTimedOut: after `limit_s` seconds; it names who has not come.
    """
    host, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0"))
    since, limit = time.monotonic(), timedelta(seconds=limit_s)
    try:
        served = TCPStore(host, port, world_size, rank == 0, limit, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if rank == 0:
            raise RanksError(f"ranks cannot meet at {host}:{port} (placement.rendezvous_port): {error}") from error
        raise _absent(rank, [0], f"{host}:{port}", since) from error
    store = PrefixStore(f"generation-{os.environ.get(ending.GENERATION, '0')}", served)
    keys = [f"here/{other}" for other in range(world_size)]
    store.set(keys[rank], "")
    while not store.check(keys):
        if time.monotonic() - since > limit_s:
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
            raise _absent(rank, missing, f"{host}:{port}", since)
        time.sleep(MEET_S)
    return store


def _absent(rank: int, others: list[int], where: str, since: float) -> CollectiveTimedOut:
    names, key, waited_s = [f"learner-{one}" for one in others], "placement.give_up_after_s", time.monotonic() - since
    report = expired(f"other learner ranks at {where}", owed_by=names, waited_s=waited_s, key=key)
    said = f"rank {rank} waited {waited_s:.0f} s at {where} for {', '.join(names)} ({key}){report} [silent]"
    return CollectiveTimedOut(said)


def named(error: Exception) -> Exception:
    """The error of a process that breaks off; of a collective that took too long, with a report.

    torch has no class for that: gloo raises RuntimeError, NCCL one of its own.
    """
    if isinstance(error, SlipstreamError):
        return error
    text = f"{type(error).__name__}: {str(error).strip()}"
    if TIMED_OUT.search(text):
        key = "learner.collective_deadline_s"
        said = expired("the other learner ranks, in a collective", owed_by=("learner ranks",), waited_s=0.0, key=key)
        first, newline, rest = text.partition("\n")
        return CollectiveTimedOut(
            f"{first}; a rank that the others wait for stands still{said} [silent]{newline}{rest}"
        )
    return CollectiveFailed(text) if isinstance(error, dist.DistError) else Unexpected(text)


def device_of(config: Config) -> torch.device:
    """The device of this rank: GPU number LOCAL_RANK among the visible ones, or the CPU.

    Raises:
        RanksError: the placement asks for a GPU that this process does not see.
    """
    placement, visible = config.placement.device, torch.cuda.device_count()
    if placement == "cpu" or (placement == "auto" and not visible):
        return torch.device("cpu")
    if not visible:
        raise RanksError("placement.device: 'cuda', but torch finds no GPU here; take 'cpu' or 'auto'")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= visible:
        raise RanksError(
            f"learner rank {local_rank} of this node has no GPU: {visible} are visible"
            f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')});"
            " start fewer ranks here or change placement"
        )
    return torch.device("cuda", local_rank)


def set_deterministic(wanted: bool) -> None:
    """Deterministic kernels, or not (learner.deterministic), before the first of this process.

    Of the learner's own code, the Triton kernels and chunked products add nothing up across programs; sums over
    trajectories are segment reductions. torch's flag decides about the rest: the backward of flash and memory-efficient
    attention, and of indexing. cuBLAS needs a workspace that is not shared, NCCL one algorithm, the compiler no
    benchmarks: by environment, which a rank that was started by hand does not have yet.
    """
    if wanted:
        for name, value in DETERMINISTIC.items():
            os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = wanted, False
    log.info("deterministic kernels: %s (learner.deterministic)", "on" if wanted else "off")
