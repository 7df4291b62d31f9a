"""What of each parameter this rank holds, and how the whole is put together again.

FSDP2 shards dimension 0 as torch.chunk does: ceil(rows / ranks) rows each, the last ranks fewer or none. Tensor ranks
have divided a dimension evenly before that, so a rank holds a block of rows and columns. Gathers go through one flat
buffer per span of parameters, because at small sizes the number of round trips is all that counts (25 parameters one by
one: 25 to 48 ms on gloo; in one buffer: about 1 ms).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as Sharded

from configs.errors import SlipstreamError
from learner.policy.meshes import Meshes
from weight_bus.digest import Digester, TensorSlice
from weight_bus.packing import Pieces

GATHER_BYTES = 64 * 1024 * 1024
"""Parameters are gathered in spans of at most this many bytes (whole tensors, in the wire dtype); a larger one alone.
Peak memory of a gather: the span as received, and this rank's part of it once more."""
CUDA_GATHER_BYTES = 512 * 1024 * 1024
"""The same on a GPU, where a collective is only as fast as it is large."""

Item = TypeVar("Item")
MASK = (1 << 64) - 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CopiesDiffer(SlipstreamError, RuntimeError, code="SLIP-LEARN-04"):
    """Ranks that hold the same part of a tensor hold other bits; names the tensor."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One logical tensor by its HF name: the block held here (float32, unless frozen), and where it belongs."""

    name: str
    shape: tuple[int, ...]
    local: torch.Tensor
    first_row: int
    first_column: int = 0
    split: int | None = None
    """Dimension that tensor ranks divide, 0 or 1; None where each has all of it."""
    tensor_ranks: int = 1
    copies: int = 1
    """Ranks that hold this very block."""
    counts: bool = True
    """Whether this is the one copy that stands for all."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def rows_of(self, rank: int, world_size: int) -> tuple[int, int]:
        """First row held by `rank`, among those that hold one copy of the model, and the one after its last."""
        tensor_ranks, (part, tensor_rank) = self.tensor_ranks, divmod(rank, self.tensor_ranks)
        if self.split != 0:
            return row_range(self.shape[0], part, world_size // tensor_ranks)
        block = self.shape[0] // tensor_ranks
        begin, end = row_range(block, part, world_size // tensor_ranks)
        return tensor_rank * block + begin, tensor_rank * block + end

    def columns_of(self, rank: int) -> tuple[int, int]:
        """The same of columns; a tensor of one dimension has one."""
        columns = self.shape[1] if len(self.shape) > 1 else 1
        width = columns // self.tensor_ranks if self.split == 1 else columns
        begin = rank % self.tensor_ranks * width if self.split == 1 else 0
        return begin, begin + width

    def held_by(self, rank: int, world_size: int) -> int:
        """Elements that `rank` holds."""
        (row, last_row), (column, last_column) = self.rows_of(rank, world_size), self.columns_of(rank)
        return (last_row - row) * (last_column - column) * math.prod(self.shape[2:])


def row_range(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """First row held by `rank` and the one after its last.

    Example: 5 rows on 4 ranks are 2, 2, 1 and 0 rows.
    """
    size = -(-rows // world_size)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def shard_of(name: str, parameter: torch.Tensor, meshes: Meshes) -> Shard:
    """Describe a parameter; shares its memory."""
    local, split = local_of(parameter).detach(), split_of(parameter)
    whole_here = split is None and meshes.tensor_ranks > 1
    shard = Shard(
        name,
        tuple(parameter.shape),
        local,
        first_row=0,
        split=split,
        tensor_ranks=meshes.tensor_ranks,
        copies=meshes.replicas * (meshes.tensor_ranks if whole_here else 1),
        counts=meshes.in_first_replica and not (whole_here and meshes.tensor_rank),
    )
    rank, world_size = dist.get_rank(meshes.replica), dist.get_world_size(meshes.replica)
    (begin, end), (first, last) = shard.rows_of(rank, world_size), shard.columns_of(rank)
    found, expected = tuple(local.shape[:2]), (end - begin, last - first)[: local.dim()]
    if found != expected:
        raise ValueError(f"{name}: {found} of {shard.shape} on rank {rank}, expected {expected}")
    return replace(shard, first_row=begin, first_column=first)


def split_of(parameter: torch.Tensor) -> int | None:
    """The dimension of a parameter that tensor ranks divide."""
    names = (parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else ()
    if not isinstance(parameter, DTensor) or "tensor" not in names:
        return None
    placement = parameter.placements[names.index("tensor")]
    return placement.dim if isinstance(placement, Sharded) else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gather(shards: Iterable[Shard], dtype: torch.dtype, group: dist.ProcessGroup) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors in `dtype`, real on every rank, to keep. A collective: exhaust it."""
    for name, pieces in gather_pieces(shards, dtype, group):
        yield name, pieces.whole()


def gather_pieces(
    shards: Iterable[Shard], dtype: torch.dtype, group: dist.ProcessGroup, *, only: int | None = None
) -> Iterator[tuple[str, Pieces]]:
    """Whole tensors as the parts of each rank, in order. A collective: exhaust it.

    Nothing is put together but what tensor ranks have divided by columns: a rank that needs the tensor copies the
    parts. Nothing else is written to their memory. `group` holds one copy of the model. With `only`, parts go through
    host memory to that rank of the group alone, and others get nothing.
    """
    if dist.get_world_size(group) == 1:
        for shard in shards:
            yield shard.name, Pieces(shard.shape, dtype, [shard.local.reshape(-1)])
        return
    shards = list(shards)
    limit = CUDA_GATHER_BYTES if any(shard.local.is_cuda for shard in shards) else GATHER_BYTES
    for span in spans(shards, lambda shard: shard.numel * dtype.itemsize, limit):
        yield from _gather_span(span, dtype, group, only)


def spans(items: Iterable[Item], bytes_of: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Cut into consecutive spans of at most `limit` bytes, each of at least one item."""
    span: list[Item] = []
    size = 0
    for item in items:
        if span and size + bytes_of(item) > limit:
            yield span
            span, size = [], 0
        span.append(item)
        size += bytes_of(item)
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
        yield shard.name, Pieces(shard.shape, dtype, _in_order(shard, parts))


def _in_order(shard: Shard, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flat parts by rank, as flat parts in row-major order; columns that ranks have divided are copied together."""
    step, world_size = shard.tensor_ranks, len(parts)
    if shard.split is None:
        return parts[::step]  # the others are copies
    if shard.split == 0:
        return [parts[rank] for first in range(step) for rank in range(first, world_size, step)]
    whole = parts[0].new_empty(shard.shape)
    for rank, part in enumerate(parts):
        rows, columns = slice(*shard.rows_of(rank, world_size)), slice(*shard.columns_of(rank))
        whole[rows, columns] = part.view(whole[rows, columns].shape)
    return [whole.view(-1)]


def _carrier(held: torch.Tensor, group: dist.ProcessGroup) -> torch.device:
    """Where a collective takes numbers from: gloo host memory, NCCL none of it, where moments may lie."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return held.device if held.is_cuda else torch.device("cuda")


def digester(shards: Iterable[Shard], dtype: torch.dtype) -> Digester:
    """For the local blocks of shards whose memory stays where it is."""
    return Digester(
        TensorSlice(s.local, s.shape, (s.first_row, s.first_column, *(0,) * (len(s.shape) - 2))[: len(s.shape)], dtype)
        for s in shards
    )


def digests(
    shards: Sequence[Shard], dtype: torch.dtype, group: dist.ProcessGroup, made: Digester | None = None
) -> dict[str, int]:
    """slice_digest of each whole tensor in `dtype`, from the local blocks and one all_reduce. A collective.

    `group` is of all ranks, `made` is `digester(shards, dtype)` of an earlier call.

    The sum is modulo 2^64, and a collective promises nothing about overflow: the two halves travel as int64
    of 32 bits each, which cannot overflow below 2^31 ranks. Of what several ranks hold one counts, and the sum over
    all of them shows whether they hold the same.

    Raises:
        CopiesDiffer: they do not; on all ranks.
    """
    sums = (made or digester(shards, dtype)).launch().sums()
    counted = [own if shard.counts else 0 for shard, own in zip(shards, sums, strict=True)]
    columns = [counted, sums] if any(shard.copies > 1 for shard in shards) else [sums]
    halves = [[half for own in row for half in (own >> 32, own & 0xFFFFFFFF)] for row in zip(*columns, strict=True)]
    totals = torch.tensor(halves, dtype=torch.int64).to(_carrier(shards[0].local, group))
    dist.all_reduce(totals, group=group)
    found = {}
    for shard, (high, low, *everywhere) in zip(shards, totals.tolist(), strict=True):
        found[shard.name] = ((high << 32) + low) & MASK
        if everywhere and ((everywhere[0] << 32) + everywhere[1] - shard.copies * found[shard.name]) & MASK:
            raise CopiesDiffer(
                f"{shard.name}: the {shard.copies} copies that learner ranks hold are no longer equal, so a device or a"
                " collective gave ranks different bits; go on from the newest checkpoint"
            )
    return found
