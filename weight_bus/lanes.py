"""Lanes of an update: which learner rank sends which slices to which scheduler rank. No tensors, no I/O.

Scheduler ranks of an engine are its *positions* (0 to tensor_parallel - 1, alike in all engines): each needs a slice
of every tensor, or a copy. A *lane* is a group of one sender, a learner rank, and one position of every engine. There
are as many lanes as the larger side has members: each of those is in one group, and each of the others in few.

    senders 0 1 2 3 to positions 0 1:  lanes 0>0 1>0 2>1 3>1      senders 0 1 to positions 0 1 2 3:  0>0 0>1 1>2 1>3

What a position needs of a tensor, mostly one slice, travels in one lane. One sender and one position have one lane, of
whole tensors.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from weight_bus.digest import add
from weight_bus.manifest import ALIGNMENT, ITEM_SIZES, Entry, Layout, Manifest, Planner

Place = tuple[str, tuple[int, ...]]
"""Of a slice: the tensor, and where it begins there."""


class Slice(NamedTuple):
    """What a position needs of a tensor."""

    name: str
    dtype: str
    whole: tuple[int, ...]  # shape of the tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size on the wire."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Lane:
    """One sender, one position, and what passes between them."""

    number: int
    sender: int
    position: int
    layout: Layout


def whole(name: str, dtype: str, shape: Sequence[int]) -> Slice:
    """All of a tensor."""
    return Slice(name, dtype, tuple(shape), (0,) * len(shape), tuple(shape))


def plan_lanes(
    wanted: Sequence[Iterable[Slice]],
    senders: int,
    bucket_bytes: int,
    alignment: int = ALIGNMENT,
    kept: Iterable[str] = (),
) -> tuple[Lane, ...]:
    """Divide what each position needs over the senders, evenly by bytes. All ranks and runs find the same.

    A lane with nothing to send is left out. `kept` tensors do not travel: their digests come with the first lane.

    Raises ValueError, see `Planner.place`.
    """
    count = max(senders, len(wanted))
    lanes: list[Lane] = []
    for position, slices in enumerate(wanted):
        numbers = [number for number in range(count) if number * len(wanted) // count == position]
        planners = {n: Planner(bucket_bytes, alignment, first_of(bucket_bytes)) for n in numbers}
        loads, sizes, pieces = dict.fromkeys(numbers, 0), dict[str, int](), list(slices)
        for piece in pieces:
            sizes[piece.name] = sizes.get(piece.name, 0) + max(1, piece.num_bytes)
        chosen: dict[str, int] = {}
        for name in sorted(sizes, key=lambda name: -sizes[name]):  # a large one that came last would be on top
            chosen[name] = min(numbers, key=lambda n: loads[n])
            loads[chosen[name]] += sizes[name]
        for piece in pieces:
            planners[chosen[piece.name]].place(piece.name, piece.dtype, piece.shape, piece.start, piece.whole)
        for number in numbers:
            if loads[number]:
                kept_here = kept if not lanes else ()
                lanes.append(Lane(len(lanes), number * senders // count, position, planners[number].layout(kept_here)))
    return tuple(lanes)


def first_of(bucket_bytes: int) -> int:
    """Bytes of the first bucket of a lane."""
    return max(1, bucket_bytes // 8)


@dataclass(frozen=True, slots=True)
class Joined:
    """Several lanes as one layout, for the end that sends or receives all of them. Their buckets take turns."""

    layout: Layout  # its buckets are those of all lanes; a sender's may have a box once a lane
    sources: tuple[tuple[int, int], ...]
    """Of each bucket: the lane, counted from 0 in the order given, and its number there."""


def joined(lanes: Sequence[Layout]) -> Joined:
    """Lanes bucket by bucket in turn, so that none waits for the end of another."""
    if len(lanes) == 1:
        return Joined(lanes[0], tuple((0, index) for index in range(len(lanes[0].bucket_sizes))))
    longest = max(len(lane.bucket_sizes) for lane in lanes)
    turns = [(n, index) for index in range(longest) for n, lane in enumerate(lanes) if index < len(lane.bucket_sizes)]
    parted = [lane.by_bucket() for lane in lanes]
    entries = [replace(e, bucket=bucket) for bucket, (n, index) in enumerate(turns) for e in parted[n][index]]
    sizes = tuple(lanes[n].bucket_sizes[index] for n, index in turns)
    kept = tuple(name for lane in lanes for name in lane.kept)
    return Joined(Layout(tuple(entries), sizes, kept), tuple(turns))


def whole_digests(lanes: Iterable[Manifest]) -> dict[str, int]:
    """Digest of each tensor from those of its slices, in all lanes of a version; copies count once.

    Raises ValueError: slices of a tensor do not make it up, or copies of one differ.
    """
    parts: dict[str, dict[tuple[Entry, ...], int]] = {}
    kept: dict[str, int] = {}
    for lane in lanes:
        kept |= {name: lane.digests[name] for name in lane.layout.kept}
        slices: dict[str, list[Entry]] = {}
        for entry in lane.layout.entries:
            slices.setdefault(entry.name, []).append(replace(entry, bucket=0, offset=0))
        for name, its in slices.items():
            if parts.setdefault(name, {}).setdefault(tuple(its), lane.digests[name]) != lane.digests[name]:
                raise ValueError(f"two lanes carry other copies of {name!r} at {[*its[0].start]}")
    for name, pieces in parts.items():
        entries = [entry for its in pieces for entry in its]
        size = math.prod(entries[0].whole)
        if any(e.whole != entries[0].whole for e in entries) or sum(math.prod(e.shape) for e in entries) != size:
            raise ValueError(f"the slices of {name!r} in all lanes do not make it up")
    return {**{name: add([*pieces.values()]) for name, pieces in parts.items()}, **kept}


def described(lane: Lane) -> str:
    """A lane in words."""
    return f"lane {lane.number}, from learner rank {lane.sender} to scheduler rank {lane.position}"
