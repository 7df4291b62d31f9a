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
from weight_bus.manifest import ALIGNMENT, Entry, Manifest, Planner, aligned
from weight_bus.staging import DTYPES, HOST, NAMES, view_of

Named = Iterable[tuple[str, "torch.Tensor | Pieces"]]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor that is put together, and cast, in its bucket."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """What it becomes; the parts may be wider."""
    parts: Sequence[torch.Tensor]
    """Its elements in row-major order, in at least one flat part."""

    def whole(self) -> torch.Tensor:
        """The tensor itself, a copy."""
        return torch.cat(list(self.parts)).to(self.dtype).view(self.shape)


class Progress:
    """How far a version is packed: the bus sends bucket after bucket behind the packing. For any thread."""

    def __init__(self, buckets: int, packed: int) -> None:
        self.called_off = ""
        """Why the version is not to be applied, whatever was sent of it."""
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


def ignore(packed: int) -> None:
    """For callers of `pack` that do not follow its progress."""


class Packer:
    """Two alternating sets of buckets: one is sent and kept for joins while the other is filled.

    Costs twice the size of the model in the wire dtype, in host memory or, with a transport between GPUs, in the
    memory of learner rank 0's GPU.
    """

    def __init__(self, bucket_bytes: int, device: torch.device = HOST, alignment: int = ALIGNMENT) -> None:
        self._bucket_bytes = bucket_bytes
        self._alignment = alignment
        self._device = device
        self._layout: Manifest | None = None
        self._sets: list[list[torch.Tensor]] = [[], []]
        self._views: list[list[torch.Tensor]] = [[], []]
        """The tensors of each set."""

    def room(self, into: int) -> tuple[Manifest, list[torch.Tensor]] | None:
        """Layout (without digests) and buckets of an update that is still to be packed; None before the first."""
        if self._layout is None:
            return None
        buckets = self._sets[into]
        if not buckets:
            pinned = any(bucket.is_pinned() for bucket in self._sets[1 - into])
            buckets.extend(self._new(size, pinned=pinned) for size in self._layout.bucket_sizes)
        if not self._views[into]:
            self._views[into] = [view_of(buckets, entry) for entry in self._layout.entries]
        return self._layout, buckets

    def pack(
        self, named_tensors: Named, into: int, packed: Callable[[int], None] = ignore
    ) -> tuple[Manifest, list[torch.Tensor]]:
        """Copy an update into set `into` (0 or 1). The copies have ended when this returns.

        Args:
            named_tensors: in wire dtype, on any device; read on the current stream. On a GPU all of a bucket are
                read together, so none may be written before this returns.
            into: the set that is not being read.
            packed: from the second update on, called with how many buckets are whole and finite, as they get so.

        Returns:
            The layout (without digests) and the buckets, flat uint8.

        Raises:
            NonFiniteWeights: a tensor holds NaN or infinity.
            ValueError: a tensor has no place (`Planner.place`), or names, dtypes or shapes differ from the first
                update's.
        """
        room = self.room(into)
        if room is None:
            layout, buckets = self._fill_first(named_tensors)
            inspection = Inspection(layout, buckets)
            for index in range(len(buckets)):
                inspection.add(index)
        else:
            layout, buckets = room
            inspection = Inspection(layout, buckets, packed)
            _fill(named_tensors, layout, self._views[into], inspection.add)
        inspection.end()
        self._layout, self._sets[into] = layout, buckets
        return layout, buckets

    def _fill_first(self, named_tensors: Named) -> tuple[Manifest, list[torch.Tensor]]:
        planner = Planner(self._bucket_bytes, self._alignment)
        buckets: list[torch.Tensor] = []
        filling = _Filling()
        for name, tensor in named_tensors:
            entry = planner.place(name, NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            if entry.bucket == len(buckets):
                pinned = isinstance(tensor, torch.Tensor) and tensor.is_cuda and self._device == HOST
                buckets.append(self._new(aligned(max(self._bucket_bytes, entry.num_bytes)), pinned=pinned))
            filling.add(tensor, view_of(buckets, entry))
            filling.end()
        layout = planner.manifest()
        return layout, [bucket[:size] for bucket, size in zip(buckets, layout.bucket_sizes, strict=True)]

    def _new(self, size: int, *, pinned: bool) -> torch.Tensor:
        # zero, because the bytes between tensors travel too and are never written again
        return torch.zeros(size, dtype=torch.uint8, device=self._device, pin_memory=pinned)


class _Filling:
    """Copies into one set. On a GPU those of a bucket are launched together: one by one they take longer than their
    bytes do."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = []

    def add(self, source: torch.Tensor | Pieces, target: torch.Tensor) -> None:
        """Copy a tensor, at the latest with `end`."""
        if isinstance(source, Pieces):
            self._add_pieces(source, target)
        elif source.is_cuda and target.is_cuda:
            self._targets.append(target)
            self._parts.append(source.detach())
        else:
            target.copy_(source.detach())
        if not target.is_cuda:
            self.end()

    def end(self) -> None:
        """The bucket has all of its tensors."""
        if self._parts:
            torch._foreach_copy_(self._targets, self._parts)
        self._targets, self._parts = [], []

    def _add_pieces(self, source: Pieces, target: torch.Tensor) -> None:
        parts = [part for part in source.parts if part.numel()]
        sizes = [part.numel() for part in parts]
        if sum(sizes) != target.numel():
            raise ValueError(f"pieces of {sizes} elements do not make up {source.shape}")
        if parts:
            self._targets += torch.split(target.view(-1), sizes)
            self._parts += parts


def _fill(named_tensors: Named, layout: Manifest, views: Sequence[torch.Tensor], filled: Callable[[int], None]) -> None:
    """Copy all tensors; calls `filled` for each bucket that is complete."""
    places = zip(layout.entries, views, strict=True)
    filling = _Filling()
    present = 0
    for name, tensor in named_tensors:
        entry, view = next(places, (None, None))
        found = (name, NAMES.get(tensor.dtype), tuple(tensor.shape))
        if entry is None or view is None or found != (entry.name, entry.dtype, entry.shape):
            raise ValueError(f"the update has changed its layout: expected {entry}, got {found}")
        if entry.bucket != present:
            filling.end()
            filled(present)
            present = entry.bucket
        filling.add(tensor, view)
    left, _ = next(places, (None, None))
    if left is not None:
        raise ValueError(f"the update ends before tensor {left.name!r}, which earlier updates carried")
    filling.end()
    if layout.entries:
        filled(present)


class Inspection:
    """Looks for NaN and infinity in buckets as they are filled.

    On a GPU it is one bucket behind: the next one is being filled while the sum of this one is on its way here.
    """

    def __init__(self, layout: Manifest, buckets: list[torch.Tensor], packed: Callable[[int], None] = ignore) -> None:
        self._by_bucket = layout.by_bucket()
        self._buckets = buckets
        self._packed = packed
        self._under_way: deque[tuple[int, torch.Tensor, torch.cuda.Event | None]] = deque()

    def add(self, index: int) -> None:
        """Bucket `index` is filled, as far as the current stream is concerned.

        Raises:
            NonFiniteWeights: a tensor of this bucket or an earlier one holds NaN or infinity.
        """
        total = self._sum(index)
        event = None
        if total.is_cuda:
            total = torch.empty((), pin_memory=True).copy_(total, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._under_way.append((index, total, event))
        if event is None or len(self._under_way) > 1:
            self._settle()

    def end(self) -> None:
        """There are no more. Raises NonFiniteWeights as `add` does."""
        while self._under_way:
            self._settle()

    def _sum(self, index: int) -> torch.Tensor:
        """Of all elements, in float32, because a GPU then sums 2-byte numbers without a copy of them all."""
        entries = self._by_bucket[index]
        dtypes = {entry.dtype for entry in entries}
        if len(dtypes) == 1:  # with the bytes between tensors, which are zero
            return self._buckets[index].view(DTYPES[dtypes.pop()]).sum(dtype=torch.float32)
        return torch.stack([view_of(self._buckets, entry).sum(dtype=torch.float32) for entry in entries]).sum()

    def _settle(self) -> None:
        index, total, event = self._under_way.popleft()
        if event is not None:
            event.synchronize()
        if not math.isfinite(total.item()):  # of finite numbers, too, where they are so large
            _find_non_finite(self._by_bucket[index], self._buckets)
        self._packed(index + 1)


def _find_non_finite(entries: Sequence[Entry], buckets: list[torch.Tensor]) -> None:
    for entry in entries:
        bad = int((~torch.isfinite(view_of(buckets, entry))).sum())
        if bad:
            values = math.prod(entry.shape)
            raise NonFiniteWeights(
                f"tensor {entry.name!r} has {bad} non-finite of {values} values; nothing of the update is applied"
            )
