"""The digests of staged bytes after a change, carried forward from those before it instead of taken anew.

A digest is a sum over elements (weight_bus/digest), so that of the new bytes is that of the old ones, less the terms
of the elements that change as they were, and plus their terms as they are. For one element in a hundred that is a
small share of the work. On a GPU it would be no gain: the kernel reads everything faster than this finds its tensors.

What it proves: if the base was proven, and nobody has written to the staged memory since, a digest that is the
manifest's says that the bytes are. A bit that has flipped there in between shows here only where its element changes;
elsewhere it goes along, and shows in the digests of the live weights, which are always taken whole: the engine that has
copied it is quarantined, never served, and filled anew.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weight_bus.delta import coding
from weight_bus.digest.definition import MASK, keys, mix
from weight_bus.manifest import ITEM_SIZES, Entry, Manifest

PRICE = 16
"""What a changed element costs here, in elements that are digested whole."""


class _Bucket(NamedTuple):
    """The tensors of a bucket."""

    entries: list[Entry]
    offsets: list[int]
    """In bytes."""

    def between(self, begin: int, end: int) -> list[Entry]:
        """Those that have bytes there, in order."""
        first = max(0, bisect.bisect_right(self.offsets, begin) - 1)
        found = self.entries[first : bisect.bisect_left(self.offsets, end)]
        return [entry for entry in found if entry.num_bytes and entry.offset + entry.num_bytes > begin]


def apply(updates: Sequence[coding.Update], layout: Manifest) -> dict[str, int]:
    """Turn buckets that hold the base into the next version, in place.

    Args:
        updates: of `coding.decode`, of buckets of this layout.
        layout: of both versions.

    Returns:
        How much the digest of each tensor has grown by it, modulo 2^64. The digest of a tensor that is missing is to be
        taken anew: one in a section that came whole, or with elements of another size than its section, or of which so
        much has changed that it is less work.
    """
    buckets = [_Bucket(entries, [entry.offset for entry in entries]) for entries in layout.by_bucket()]
    grown = {entry.name: 0 for entry in layout.entries}
    for update in updates:
        width = update.place.element_size()
        end = update.begin + update.place.numel() * width
        entries = buckets[update.bucket].between(update.begin, end)
        index = update.index
        if index is None or PRICE * index.numel() > update.place.numel():
            coding.apply([update])
            for entry in entries:
                grown.pop(entry.name, None)
            continue
        old = update.place.gather(0, index)
        coding.apply([update])
        starts = [(entry.offset - update.begin) // width for entry in entries]
        ends = [start + entry.num_bytes // width for start, entry in zip(starts, entries, strict=True)]
        growth = _growth(old, update.place.gather(0, index), index, starts, ends) if entries else []
        for entry, value in zip(entries, growth, strict=True):
            if ITEM_SIZES[entry.dtype] != width:
                grown.pop(entry.name, None)
            elif entry.name in grown:
                grown[entry.name] = (grown[entry.name] + value) & MASK
    return grown


def _growth(
    old: torch.Tensor, new: torch.Tensor, index: torch.Tensor, starts: Sequence[int], ends: Sequence[int]
) -> list[int]:
    """How much the digest of each tensor grows.

    Args:
        old: bits of the elements that change, before.
        new: the same, after.
        index: where in the section they are, ascending.
        starts: where each tensor begins, ascending; below 0 for one that begins in a section before.
        ends: the first element behind it.

    Returns:
        By tensor; of one whose elements are not those of the section it means nothing.
    """
    begins = torch.tensor(starts)
    first, behind = torch.searchsorted(index, begins), torch.searchsorted(index, torch.tensor(ends))
    # each element counts from the tensor that begins last before it; one between two tensors is in none of the sums
    edges = torch.cat([first.new_zeros(1), first[1:], first.new_tensor([index.numel()])])
    keyed = keys(index - torch.repeat_interleave(begins, torch.diff(edges)))
    growth = mix(new, keyed).to(torch.int64).sub_(mix(old, keyed))
    running = torch.cat([growth.new_zeros(1), torch.cumsum(growth, 0)])
    sums: list[int] = (running[behind] - running[first]).tolist()
    return sums
