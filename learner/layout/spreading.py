"""What each learner rank packs of an update (weight_bus/lanes.py), from the boxes that ranks hold.

Slices are brought to their sender in spans, in one all-to-all each, so no rank ever has more than its lanes and a span.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from learner.layout.boxes import Box
from learner.layout.digests import digests
from learner.layout.gathering import CUDA_GATHER_BYTES, GATHER_BYTES
from learner.layout.layout import Layout, Shard
from weight_bus.digest import Digester, add
from weight_bus.lanes import Lane, Place, joined
from weight_bus.manifest import Entry
from weight_bus.packing import Pieces

Part = tuple[Box, int]
"""Of an entry: a box of the tensor, and which rank of the group gives it."""


class Wanted(NamedTuple):
    """An entry, and where its elements are."""

    entry: Entry
    parts: list[Part]

    @property
    def num_bytes(self) -> int:
        return self.entry.num_bytes


class Spreader:
    """Brings slices to their senders, which are the ranks of a group that holds all of the model together."""

    def __init__(self, layout: Layout, lanes: Sequence[Lane], group: dist.ProcessGroup, *, on_gpu: bool) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        places = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
        limit = (CUDA_GATHER_BYTES if on_gpu else GATHER_BYTES) // len(places)
        queues = [_wanted(layout, lanes, sender, places) for sender in range(len(places))]
        spans = [list(_spans(queue, limit)) for queue in queues]
        self._turns = [[its[turn] if turn < len(its) else [] for its in spans] for turn in range(max(map(len, spans)))]
        """Of each turn, what each rank gets."""

    def pieces(self, shards: Iterable[Shard], dtype: torch.dtype) -> Iterator[tuple[str, Pieces]]:
        """This rank's entries in the order of `joined`. A collective: exhaust it."""
        held = {shard.name: shard for shard in shards}
        for turn in self._turns:
            yield from self._turn(turn, held, dtype)

    def _turn(
        self, turn: Sequence[Sequence[Wanted]], held: Mapping[str, Shard], dtype: torch.dtype
    ) -> Iterator[tuple[str, Pieces]]:
        size, me = len(turn), self._rank
        received: list[list[torch.Tensor]] = [[] for _ in range(size)]
        if size > 1:
            given: list[list[torch.Tensor]] = [[] for _ in range(size)]
            for place in range(size):
                parts = [(w, box) for w in turn[place] for box, giver in w.parts if giver == me and place != me]
                given[place] = [_view(held[w.entry.name], box).reshape(-1) for w, box in parts]
            counts = [sum(box.numel for w in turn[me] for box, g in w.parts if g == giver) for giver in range(size)]
            counts[me] = 0
            received = self._exchange(given, counts, next(iter(held.values())).local.device, dtype)
        for wanted in turn[me]:
            tensors, slices = [], []
            for box, giver in wanted.parts:
                if giver == me:
                    part = _view(held[wanted.entry.name], box)
                else:
                    part, received[giver][0] = received[giver][0][: box.numel], received[giver][0][box.numel :]
                tensors.append(part.reshape(box.shape))
                slices.append(box.seen_from(wanted.entry.start).slices)
            yield wanted.entry.name, Pieces(wanted.entry.shape, dtype, tensors, slices)

    def _exchange(
        self, given: Sequence[Sequence[torch.Tensor]], counts: Sequence[int], device: torch.device, dtype: torch.dtype
    ) -> list[list[torch.Tensor]]:
        sizes = [sum(tensor.numel() for tensor in tensors) for tensors in given]
        send, flat = torch.empty(sum(sizes), dtype=dtype, device=device), [t for tensors in given for t in tensors]
        if flat:
            torch._foreach_copy_(list(torch.split(send, [tensor.numel() for tensor in flat])), flat)  # casts
        found = torch.empty(sum(counts), dtype=dtype, device=device)
        width = dtype.itemsize  # as bytes, which every backend carries
        dist.all_to_all_single(
            found.view(torch.uint8),
            send.view(torch.uint8),
            [count * width for count in counts],
            [size * width for size in sizes],
            group=self._group,
        )
        return [[part] for part in torch.split(found, list(counts))]


def _wanted(layout: Layout, lanes: Sequence[Lane], sender: int, places: Mapping[int, int]) -> list[Wanted]:
    """Entries of a sender. Raises ValueError: ranks outside of the group hold what none of it has."""
    mine = [lane.layout for lane in lanes if lane.sender == sender]
    found = []
    for entry in joined(mine).layout.entries if mine else ():
        parts, place = [], Box(entry.start, entry.shape)
        for box, here in layout.givers(entry.name, places):
            if (common := box.common(place)).numel:
                parts.append((common, sender if sender in here else here[0]))
        found.append(Wanted(entry, parts))
    return found


def _spans(queue: Sequence[Wanted], limit: int) -> Iterator[list[Wanted]]:
    """Small ones first, so that the first bucket is soon there."""
    span: list[Wanted] = []
    size, bound = 0, max(1, limit // 8)
    for wanted in queue:
        if span and size + wanted.num_bytes > bound:
            yield span
            span, size, bound = [], 0, min(limit, 2 * bound)
        span.append(wanted)
        size += wanted.num_bytes
    if span:
        yield span


def _view(shard: Shard, box: Box) -> torch.Tensor:
    return shard.local[box.seen_from(shard.start).slices]


def slice_shards(shards: Iterable[Shard], lanes: Sequence[Lane]) -> tuple[list[Place], list[Shard]]:
    """Every slice of a tensor that lanes carry, once, and what of it is here."""
    boxes: dict[str, dict[tuple[int, ...], Box]] = {}
    for lane in lanes:
        for entry in lane.layout.entries:
            boxes.setdefault(entry.name, {})[entry.start] = Box(entry.start, entry.shape)
    places, found = [], []
    for shard in shards:
        for start, box in boxes[shard.name].items():
            common = box.common(shard.box)
            local = _view(shard, common) if common.numel else shard.local.new_empty((0, *shard.shape[1:]))
            places.append((shard.name, start))
            found.append(replace(shard, name=f"{shard.name} at {[*start]}", local=local, start=common.start))
    return places, found


def slice_digests(
    places: Sequence[Place], slices: Sequence[Shard], dtype: torch.dtype, group: dist.ProcessGroup, made: Digester
) -> tuple[dict[Place, int], dict[str, int]]:
    """Digests of `slice_shards`, and of the whole tensors that they make up. A collective, see `digests`."""
    found = dict(zip(places, digests(slices, dtype, group, made).values(), strict=True))
    wholes: dict[str, int] = {}
    for (name, _), digest in found.items():
        wholes[name] = add([wholes.get(name, 0), digest])
    return found, wholes
