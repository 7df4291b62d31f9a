"""Memory in which the publisher puts an update together, bucket by bucket, on the host or a GPU.

Two sets of buckets take turns: one is sent, and kept for joins, while the other is filled. From the third update on
nothing is allocated. What is packed is looked at, so that nothing that is not finite is ever applied.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from weight_bus.errors import NonFiniteWeights
from weight_bus.manifest import ALIGNMENT, Entry, Layout, Planner, aligned
from weight_bus.staging import DTYPES, HOST, NAMES, view_of
from weight_bus.transports.base import ignore

Named = Iterable[tuple[str, "torch.Tensor | Pieces"]]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor that is put together, and cast, in its bucket."""

    shape: tuple[int, ...]
    dtype: torch.dtype  # what it becomes; the parts may be wider
    parts: Sequence[torch.Tensor]  # its elements in row-major order, in at least one flat part
    places: Sequence[tuple[slice, ...]] | None = None
    """Where each part belongs, which then has that shape, in any order."""

    def whole(self) -> torch.Tensor:
        """The tensor itself, a copy."""
        if self.places is None:
            return torch.cat(list(self.parts)).to(self.dtype).view(self.shape)
        made = torch.empty(self.shape, dtype=self.dtype, device=self.parts[0].device)
        for part, place in zip(self.parts, self.places, strict=True):
            made[place] = part
        return made


class PackingProgress:
    """How far a version is packed: the bus sends bucket after bucket behind the packing. For any thread."""

    def __init__(self, buckets: int, packed: int) -> None:
        self.called_off = ""  # why the version is not to be applied, whatever was sent of it
        self._changed = threading.Condition()
        self._buckets, self._packed = buckets, packed
        self._waited_in_vain = False

    @property
    def stalled(self) -> bool:
        """A wait for a bucket has timed out, and the bucket is still not packed."""
        return self._waited_in_vain and self._packed < self._buckets and not self.called_off

    def reach(self, packed: int) -> None:
        """Mark the first `packed` buckets complete."""
        with self._changed:
            self._packed = packed
            self._changed.notify_all()

    def call_off(self, reason: str) -> None:
        """Withdraw the version: its buckets may be sent and are not to be applied."""
        with self._changed:
            self.called_off = reason
            self._changed.notify_all()

    def wait(self, index: int, limit_s: float) -> bool:
        """Until bucket `index` may be sent. False when it may not after the limit."""
        with self._changed:
            there = self._changed.wait_for(lambda: self._packed > index or bool(self.called_off), limit_s)
            self._waited_in_vain |= not there
            return there


class Packer:
    """Two alternating sets of buckets, each of the model's size in the wire dtype: in host memory or, with a transport
    between GPUs, in that of the learner rank's GPU.

    Args:
        layout: what is to be packed, where it is known; else the first update says it.
        pinned: whether buckets of host memory, with a layout, are filled from a GPU.
    """

    def __init__(
        self,
        bucket_bytes: int,
        device: torch.device = HOST,
        alignment: int = ALIGNMENT,
        kept: Iterable[str] = (),
        *,
        layout: Layout | None = None,
        pinned: bool = False,
    ) -> None:
        self._bucket_bytes, self._device, self._alignment = bucket_bytes, device, alignment
        self._kept = sorted(kept)
        self._layout, self._pinned = layout, pinned and device == HOST
        self._sets: list[list[torch.Tensor]] = [[], []]
        self._views: list[list[torch.Tensor]] = [[], []]  # the tensors of each set, as far as they were packed once

    def room(self, into: int) -> tuple[Layout, list[torch.Tensor]] | None:
        """Layout and buckets of an update that is still to be packed; None before the first."""
        if self._layout is None:
            return None
        buckets = self._sets[into]
        if not buckets:
            buckets.extend(self._new(size, pinned=self._pinned) for size in self._layout.bucket_sizes)
        return self._layout, buckets

    def pack(
        self, named_tensors: Named, into: int, packed: Callable[[int], None] = ignore
    ) -> tuple[Layout, list[torch.Tensor]]:
        """Copy an update into set `into` (0 or 1). The copies have ended when this returns.

        Args:
            named_tensors: in wire dtype, on any device; read on the current stream. On a GPU all of a bucket are
                read together, so none may be written before this returns.
            into: the set that is not being read.
            packed: called with how many buckets are whole and finite, as they get so.

        Returns the layout and the buckets, flat uint8.

        Raises:
            NonFiniteWeights: a tensor holds NaN or infinity.
            ValueError: a tensor has no place (`Planner`), or names, dtypes or shapes differ from the first update's.
        """
        known, buckets = self.room(into) or (None, [])
        views = self._views[into] if known is not None else []
        planner, filling, number = Planner(self._bucket_bytes, self._alignment), _Filling(buckets, packed), -1
        for number, (name, tensor) in enumerate(named_tensors):
            found = (name, NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            if known is None:
                entry = planner.place(*found)
            elif number == len(known.entries):
                raise ValueError(f"the update has changed its layout: {found} is too many")
            else:
                entry = known.entries[number]
                if found != (entry.name, entry.dtype, entry.shape):
                    raise ValueError(f"the update has changed its layout: expected {entry}, got {found}")
            if entry.bucket == len(buckets):
                self._pinned |= self._device == HOST and _is_on_gpu(tensor)
                size = aligned(max(self._bucket_bytes, entry.num_bytes))
                buckets.append(self._new(size, pinned=self._pinned))
            if number == len(views):
                views.append(view_of(buckets, entry))
            filling.add(entry, tensor, views[number])
        layout = known or planner.layout(self._kept)
        if len(layout.entries) > number + 1:
            left = layout.entries[number + 1].name
            raise ValueError(f"the update ends before tensor {left!r}, which earlier updates carried")
        filling.end()
        if known is None:
            buckets = [bucket[:size] for bucket, size in zip(buckets, layout.bucket_sizes, strict=True)]
            self._layout, self._sets[into], self._views[into] = layout, buckets, views
        return layout, buckets

    def _new(self, size: int, *, pinned: bool) -> torch.Tensor:
        # zero, because the bytes between tensors travel too and are never written again
        return torch.zeros(size, dtype=torch.uint8, device=self._device, pin_memory=pinned)


def _is_on_gpu(source: torch.Tensor | Pieces) -> bool:
    return any(part.is_cuda for part in (source.parts if isinstance(source, Pieces) else (source,)))


class _Filling:
    """Copies into one set, and looks for NaN and infinity in buckets as they get full.

    On a GPU the copies of a bucket are launched together, which takes less time than one by one, and the look is one
    bucket behind: the next one is being filled while the sum of this one is on its way here.
    """

    def __init__(self, buckets: list[torch.Tensor], packed: Callable[[int], None]) -> None:
        self._buckets, self._packed = buckets, packed
        self._entries: list[Entry] = []  # of the bucket that is being filled
        self._targets: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        """Of parts on a GPU that go to host memory: taken there, where a sum is a thousand times faster."""
        self._under_way: deque[tuple[list[Entry], torch.Tensor, torch.cuda.Event | None]] = deque()

    def add(self, entry: Entry, source: torch.Tensor | Pieces, target: torch.Tensor) -> None:
        """Copy a tensor, at the latest when its bucket is full; raises NonFiniteWeights for an earlier bucket."""
        if self._entries and entry.bucket != self._entries[0].bucket:
            self._complete()
        self._entries.append(entry)
        if isinstance(source, Pieces) and source.places is not None:
            self._targets += [target[place] for place in source.places]
            self._parts += source.parts
            if sum(part.numel() for part in source.parts) != target.numel():
                raise ValueError(f"{len(source.parts)} pieces do not make up {source.shape}")
        elif isinstance(source, Pieces):
            parts = [part for part in source.parts if part.numel()]
            sizes = [part.numel() for part in parts]
            if sum(sizes) != target.numel():
                raise ValueError(f"pieces of {sizes} elements do not make up {source.shape}")
            if parts:
                self._targets += torch.split(target.view(-1), sizes)
                self._parts += parts
        else:
            self._targets.append(target)
            self._parts.append(source.detach())
        if not target.is_cuda:
            self._sums += [part.to(target.dtype).sum(dtype=torch.float32) for part in self._parts if part.is_cuda]
            self._copy()

    def end(self) -> None:
        """There are no more. Raises NonFiniteWeights."""
        if self._entries:
            self._complete()
        while self._under_way:
            self._settle()

    def _copy(self) -> None:
        if self._targets and self._targets[0].is_cuda:
            torch._foreach_copy_(self._targets, self._parts)
        else:
            for target, part in zip(self._targets, self._parts, strict=True):
                target.copy_(part.to(target.dtype))  # cast where it lies: half the bytes travel
        self._targets, self._parts = [], []

    def _complete(self) -> None:
        """The bucket is filled, as far as the current stream is concerned."""
        self._copy()
        entries, self._entries = self._entries, []
        total, event = torch.stack(self._sums).sum() if self._sums else self._sum(entries), None
        self._sums = []
        if total.is_cuda:
            total = torch.empty((), pin_memory=True).copy_(total, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._under_way.append((entries, total, event))
        if event is None or len(self._under_way) > 1:
            self._settle()

    def _sum(self, entries: list[Entry]) -> torch.Tensor:
        """Of all elements, in float32, because a GPU then sums 2-byte numbers without a copy of them all."""
        dtypes = {entry.dtype for entry in entries}
        if len(dtypes) == 1:  # with the bytes between tensors, which are zero
            return self._buckets[entries[0].bucket].view(DTYPES[dtypes.pop()]).sum(dtype=torch.float32)
        return torch.stack([view_of(self._buckets, entry).sum(dtype=torch.float32) for entry in entries]).sum()

    def _settle(self) -> None:
        entries, total, event = self._under_way.popleft()
        if event is not None:
            event.synchronize()
        if not math.isfinite(total.item()):  # of finite numbers, too, where they are so large
            for entry in entries:
                bad = int((~torch.isfinite(view_of(self._buckets, entry))).sum())
                if bad:
                    raise NonFiniteWeights(
                        f"tensor {entry.name!r} has {bad} non-finite of {math.prod(entry.shape)} values; nothing of the"
                        " update is applied"
                    )
        self._packed(entries[0].bucket + 1)
