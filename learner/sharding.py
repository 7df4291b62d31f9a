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

from weight_bus.digest import slice_digest

GATHER_BYTES = 64 * 1024 * 1024
"""Parameters are gathered in spans of at most this many bytes (whole tensors, in the wire dtype); a larger one alone.
Peak memory of a gather: twice the span, once as received and once put together."""

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

    def num_rows(self, rank: int, world_size: int) -> int:
        """Rows that `rank` holds."""
        begin, end = row_range(self.shape[0], rank, world_size)
        return end - begin


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


def gather(
    shards: Sequence[Shard], dtype: torch.dtype, group: dist.ProcessGroup | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors in `dtype`, in order, real on every rank. A collective: all ranks must exhaust it.

    A yielded tensor is a copy that the caller may keep; `group` None yields copies of the local tensors.
    """
    if group is None:
        for shard in shards:
            yield shard.name, shard.local.to(dtype, copy=True)
        return
    for span in spans(shards, dtype.itemsize):
        yield from _gather_span(span, dtype, group)


def spans(shards: Iterable[Shard], itemsize: int) -> Iterator[list[Shard]]:
    """Cut into consecutive spans of at most GATHER_BYTES, each of at least one tensor."""
    span: list[Shard] = []
    size = 0
    for shard in shards:
        num_bytes = shard.numel * itemsize
        if span and size + num_bytes > GATHER_BYTES:
            yield span
            span, size = [], 0
        span.append(shard)
        size += num_bytes
    if span:
        yield span


def _gather_span(span: list[Shard], dtype: torch.dtype, group: dist.ProcessGroup) -> Iterator[tuple[str, torch.Tensor]]:
    world_size = dist.get_world_size(group)
    # Chunking gives rank 0 at least as many rows of every tensor as any other rank, so its part is the widest.
    width = sum(math.prod(s.shape[1:]) * s.num_rows(0, world_size) for s in span)
    mine = torch.cat([s.local.reshape(-1) for s in span]).to(dtype)
    send = torch.empty(width, dtype=dtype, device=mine.device)
    send[: mine.numel()] = mine
    received = [torch.empty_like(send) for _ in range(world_size)]
    dist.all_gather(received, send, group=group)
    cursors = [0] * world_size
    for shard in span:
        row_size = math.prod(shard.shape[1:])
        parts = []
        for rank in range(world_size):
            size = shard.num_rows(rank, world_size) * row_size
            parts.append(received[rank][cursors[rank] : cursors[rank] + size])
            cursors[rank] += size
        yield shard.name, torch.cat(parts).view(shard.shape)


def digests(shards: Sequence[Shard], dtype: torch.dtype, group: dist.ProcessGroup | None) -> dict[str, int]:
    """slice_digest of each whole tensor in `dtype`, from the local rows and one all_reduce. A collective.

    The sum is modulo 2^64, and a collective's overflow is nobody's promise: the two halves travel as int64
    of 32 bits each, which cannot overflow below 2^31 ranks.
    """
    sums = [slice_digest(s.local.to(dtype), s.shape, (s.first_row, *(0,) * (len(s.shape) - 1))) for s in shards]
    if group is not None and shards:
        halves = torch.tensor([part for d in sums for part in (d >> 32, d & 0xFFFFFFFF)], dtype=torch.int64)
        halves = halves.to(shards[0].local.device)
        dist.all_reduce(halves, group=group)
        flat = halves.tolist()
        sums = [((high << 32) + low) & ((1 << 64) - 1) for high, low in zip(flat[::2], flat[1::2], strict=True)]
    return {shard.name: value for shard, value in zip(shards, sums, strict=True)}
