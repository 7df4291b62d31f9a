"""What of each parameter this rank holds, and how the whole is put together again.

FSDP2 shards dimension 0 as torch.chunk does: ceil(rows / ranks) rows each, the last ranks fewer or none. Gathers
go through one flat buffer per span of parameters, because at small sizes the number of round trips is all
that counts (25 parameters one by one: 25 to 48 ms on gloo; in one buffer: about 1 ms).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weight_bus.digest import Digester, Part
from weight_bus.packing import Pieces

GATHER_BYTES = 64 * 1024 * 1024
"""Parameters are gathered in spans of at most this many bytes (whole tensors, in the wire dtype); a larger one alone.
Peak memory of a gather: the span as received, and this rank's part of it once more."""
CUDA_GATHER_BYTES = 512 * 1024 * 1024
"""The same on a GPU, where a collective is only as fast as it is large."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Shard:
    """One logical tensor by its HF name: the rows held here (float32 master), and where they belong."""

    name: str
    shape: tuple[int, ...]
    local: torch.Tensor
    first_row: int

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def held_by(self, rank: int, world_size: int) -> int:
        """Elements that `rank` holds."""
        begin, end = row_range(self.shape[0], rank, world_size)
        return (end - begin) * math.prod(self.shape[1:])


def row_range(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """First row held by `rank` and the one after its last.

    Example: 5 rows on 4 ranks are 2, 2, 1 and 0 rows.
    """
    size = -(-rows // world_size)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def shard_of(name: str, tensor: torch.Tensor, rank: int, world_size: int) -> Shard:
    """Describe a parameter; shares its memory."""
    local = local_of(tensor).detach()
    begin, end = row_range(tensor.shape[0], rank, world_size)
    if local.shape[0] != end - begin:
        raise ValueError(f"{name}: {local.shape[0]} of {tensor.shape[0]} rows on rank {rank}, expected {end - begin}")
    return Shard(name, tuple(tensor.shape), local, begin)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(shards: Sequence[Shard], dtype: torch.dtype, group: dist.ProcessGroup) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors in `dtype`, in order, real on every rank; the caller may keep them. A collective: exhaust it."""
    for name, pieces in gather_pieces(shards, dtype, group):
        yield name, pieces.whole()


def gather_pieces(
    shards: Sequence[Shard], dtype: torch.dtype, group: dist.ProcessGroup, *, only: int | None = None
) -> Iterator[tuple[str, Pieces]]:
    """Whole tensors as the parts that each rank holds, in order, real on every rank. A collective: exhaust it.

    Nothing is put together: a rank that needs the tensor copies the parts. Nothing else is written to their memory.
    With `only`, they go through host memory to that rank of the group alone, and others get nothing.
    """
    if dist.get_world_size(group) == 1:
        for shard in shards:
            yield shard.name, Pieces(shard.shape, dtype, [shard.local.reshape(-1)])
        return
    for span in spans(shards, dtype.itemsize):
        yield from _gather_span(span, dtype, group, only)


def spans(shards: Iterable[Shard], itemsize: int) -> Iterator[list[Shard]]:
    """Cut into consecutive spans of at most GATHER_BYTES, on a GPU CUDA_GATHER_BYTES, each of at least one tensor."""
    span: list[Shard] = []
    size = 0
    for shard in shards:
        num_bytes = shard.numel * itemsize
        if span and size + num_bytes > (CUDA_GATHER_BYTES if shard.local.is_cuda else GATHER_BYTES):
            yield span
            span, size = [], 0
        span.append(shard)
        size += num_bytes
    if span:
        yield span


def _gather_span(
    span: list[Shard], dtype: torch.dtype, group: dist.ProcessGroup, only: int | None
) -> Iterator[tuple[str, Pieces]]:
    world_size = dist.get_world_size(group)
    # Chunking gives rank 0 at least as many rows of every tensor as any other rank, so its part is the widest.
    width = sum(shard.held_by(0, world_size) for shard in span)
    send = torch.empty(width, dtype=dtype, device=span[0].local.device if only is None else "cpu")
    mine = [s.local.reshape(-1) for s in span if s.local.numel()]
    if mine:
        sizes = [local.numel() for local in mine]
        torch._foreach_copy_(list(torch.split(send[: sum(sizes)], sizes)), mine)  # casts on the way
    takes = only in (None, dist.get_rank(group))
    received = torch.empty(world_size * width if takes else 0, dtype=dtype, device=send.device)
    if only is None:
        dist.all_gather_into_tensor(received, send, group=group)
    else:
        dist.gather(send, list(torch.split(received, width)) if takes else None, group=group, group_dst=only)
    if not takes:
        return
    cursors = [rank * width for rank in range(world_size)]
    for shard in span:
        parts = []
        for rank in range(world_size):
            size = shard.held_by(rank, world_size)
            parts.append(received[cursors[rank] : cursors[rank] + size])
            cursors[rank] += size
        yield shard.name, Pieces(shard.shape, dtype, parts)


def digester(shards: Iterable[Shard], dtype: torch.dtype) -> Digester:
    """For the local rows of shards whose memory stays where it is."""
    return Digester(Part(s.local, s.shape, (s.first_row, *(0,) * (len(s.shape) - 1)), dtype) for s in shards)


def digests(
    shards: Sequence[Shard], dtype: torch.dtype, group: dist.ProcessGroup, made: Digester | None = None
) -> dict[str, int]:
    """slice_digest of each whole tensor in `dtype`, from the local rows and one all_reduce. A collective.

    `made` is `digester(shards, dtype)` of an earlier call.

    The sum is modulo 2^64, and a collective promises nothing about overflow: the two halves travel as int64
    of 32 bits each, which cannot overflow below 2^31 ranks.
    """
    sums = (made or digester(shards, dtype)).launch().sums()
    device = "cpu" if dist.get_backend(group) == "gloo" else shards[0].local.device
    halves = torch.tensor([[d >> 32, d & 0xFFFFFFFF] for d in sums], dtype=torch.int64).to(device)
    dist.all_reduce(halves, group=group)
    return {
        shard.name: ((high << 32) + low) & ((1 << 64) - 1)
        for shard, (high, low) in zip(shards, halves.tolist(), strict=True)
    }
