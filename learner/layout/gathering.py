"""The whole put together again from the boxes that ranks hold.

Gathers go through one flat buffer per span of tensors, because at small sizes the number of round trips is all that
counts (25 parameters one by one: 25 to 48 ms on gloo; in one buffer: about 1 ms).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from learner.layout.boxes import Box
from learner.layout.layout import Layout, Shard
from weight_bus.packing import Pieces

GATHER_BYTES = 64 * 1024 * 1024
"""Tensors are gathered in spans of at most this many bytes (whole tensors, in the wire dtype); a larger one alone.
Peak memory of a gather: the span as received, and this rank's part of it once more."""
CUDA_GATHER_BYTES = 512 * 1024 * 1024
"""The same on a GPU, where a collective is only as fast as it is large."""

Item = TypeVar("Item")
Boxes = list[tuple[Box, int]]
"""Of a tensor, each with the rank of a group that gives it."""


def gather(
    layout: Layout, shards: Iterable[Shard], dtype: torch.dtype, group: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors in `dtype`, real on every rank, to keep. A collective: exhaust it."""
    for name, pieces in gather_pieces(layout, shards, dtype, group):
        yield name, pieces.whole()


def gather_pieces(
    layout: Layout,
    shards: Iterable[Shard],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    *,
    only: int | None = None,
) -> Iterator[tuple[str, Pieces]]:
    """Whole tensors as the boxes of each rank, in order. A collective: exhaust it.

    Nothing is put together but what is cut in other dimensions than the first: a rank that needs the tensor copies the
    boxes. Nothing else is written to their memory. Ranks of `group` hold all of it together. With `only`, boxes go
    through host memory to that rank of the group alone, and others get nothing.
    """
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1:
        for shard in shards:
            yield shard.name, Pieces(shard.shape, dtype, [shard.local.reshape(-1)])
        return
    shards = list(shards)
    places = {rank: number for number, rank in enumerate(ranks)}
    given = {s.name: [(box, here[0]) for box, here in layout.givers(s.name, places)] for s in shards}
    limit = CUDA_GATHER_BYTES if any(shard.local.is_cuda for shard in shards) else GATHER_BYTES

    def received(shard: Shard) -> int:
        """Bytes: to all, every rank sends as much as the one that gives most."""
        widest = max(box.numel for box, _ in given[shard.name])
        return dtype.itemsize * (len(ranks) * widest if only is None else shard.numel)

    for span in spans(shards, received, limit):
        yield from _gather_span(span, given, dtype, group, only)


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
    span: list[Shard], given: dict[str, Boxes], dtype: torch.dtype, group: dist.ProcessGroup, only: int | None
) -> Iterator[tuple[str, Pieces]]:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    sizes = [0] * world_size
    for shard in span:
        for box, place in given[shard.name]:
            sizes[place] += box.numel
    width = max(sizes) if only is None else sizes[rank]
    send = torch.empty(width, dtype=dtype, device=span[0].local.device if only is None else "cpu")
    mine = [s.local.reshape(-1) for s in span if any(place == rank for _, place in given[s.name])]
    if mine:
        torch._foreach_copy_(list(torch.split(send[: sizes[rank]], [one.numel() for one in mine])), mine)  # casts
    if only is None:
        received = torch.empty(world_size * width, dtype=dtype, device=send.device)
        dist.all_gather_into_tensor(received, send, group=group)
        parts = list(torch.split(received, width))
    else:
        parts = _to_one(send, sizes, group, only)
    if not parts:
        return
    used = [0] * world_size
    for shard in span:
        found = []
        for box, place in given[shard.name]:
            found.append((box, parts[place][used[place] : used[place] + box.numel]))
            used[place] += box.numel
        yield shard.name, Pieces(shard.shape, dtype, _in_order(shard.shape, found))


def _to_one(send: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, only: int) -> list[torch.Tensor]:
    """What each rank sends, on that one; nothing on others. No rank sends more than it has to give."""
    if dist.get_rank(group) != only:
        if send.numel():
            dist.send(send, group=group, group_dst=only)
        return []
    parts = [send if place == only else send.new_empty(size) for place, size in enumerate(sizes)]
    others = [(place, part) for place, part in enumerate(parts) if place != only and part.numel()]
    for work in [dist.irecv(part, group=group, group_src=place) for place, part in others]:
        assert work is not None
        work.wait()
    return parts


def _in_order(shape: tuple[int, ...], parts: list[tuple[Box, torch.Tensor]]) -> list[torch.Tensor]:
    """Flat boxes, sorted by start, as flat parts in row-major order; other cuts than of rows are copied together."""
    if all(box.shape[1:] == shape[1:] for box, _ in parts):
        return [part for _, part in parts]
    whole = parts[0][1].new_empty(shape)
    for box, part in parts:
        whole[box.slices] = part.view(box.shape)
    return [whole.view(-1)]
