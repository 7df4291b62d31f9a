"""Host memory that updates pass through: packed on the publisher, staged on a subscriber.

Both sides reuse their buffers: from the third update on nothing is allocated.
"""

from collections.abc import Iterable, Iterator

import torch

from weight_bus.digest import slice_digest
from weight_bus.errors import NonFiniteWeights
from weight_bus.manifest import Entry, Manifest, Planner, aligned

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def view_of(buckets: list[torch.Tensor], entry: Entry) -> torch.Tensor:
    """The tensor of `entry` as a view into its bucket (flat uint8)."""
    flat = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
    return flat.view(DTYPES[entry.dtype]).view(entry.shape)


class Packer:
    """Two alternating sets of host buckets: one is sent and kept for joins while the other is filled.

    Costs twice the size of the model in host memory.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._layout: Manifest | None = None
        self._sets: list[list[torch.Tensor]] = [[], []]

    def pack(self, named_tensors: Iterable[tuple[str, torch.Tensor]], into: int) -> tuple[Manifest, list[torch.Tensor]]:
        """Copy an update into set `into` (0 or 1).

        Args:
            named_tensors: in wire dtype, on any device; each is read before the next is asked for.
            into: the set that nobody reads now.

        Returns:
            The layout (without digests) and the buckets, flat uint8, in host memory.

        Raises:
            NonFiniteWeights: a tensor holds NaN or infinity.
            ValueError: a dtype cannot travel, or names, dtypes or shapes differ from the first update's.
        """
        if self._layout is None:
            return self._pack_first(named_tensors, into)
        layout, buckets = self._layout, self._sets[into]
        if not buckets:
            for other in self._sets[1 - into]:
                buckets.append(torch.empty(other.shape, dtype=torch.uint8, pin_memory=other.is_pinned()))
        entries = iter(layout.entries)
        for name, tensor in named_tensors:
            entry = next(entries, None)
            found = (name, NAMES.get(tensor.dtype), tuple(tensor.shape))
            if entry is None or found != (entry.name, entry.dtype, entry.shape):
                raise ValueError(f"the update has changed its layout: expected {entry}, got {found}")
            _copy(tensor, buckets, entry)
        left = next(entries, None)
        if left is not None:
            raise ValueError(f"the update ends before tensor {left.name!r}, which earlier updates carried")
        return layout, buckets

    def _pack_first(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], into: int
    ) -> tuple[Manifest, list[torch.Tensor]]:
        planner = Planner(self._bucket_bytes)
        buckets: list[torch.Tensor] = []
        for name, tensor in named_tensors:
            entry = planner.place(name, NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            if entry.bucket == len(buckets):
                capacity = aligned(max(self._bucket_bytes, entry.num_bytes))
                buckets.append(torch.empty(capacity, dtype=torch.uint8, pin_memory=tensor.is_cuda))
            _copy(tensor, buckets, entry)
        layout = planner.manifest()
        buckets = [bucket[:size] for bucket, size in zip(buckets, layout.bucket_sizes, strict=True)]
        self._layout, self._sets[into] = layout, buckets
        return layout, buckets


def _copy(tensor: torch.Tensor, buckets: list[torch.Tensor], entry: Entry) -> None:
    view = view_of(buckets, entry)
    view.copy_(tensor.detach())
    # a float64 sum of narrower finite numbers cannot overflow, so it is non-finite only if an element is
    if not torch.isfinite(view.sum(dtype=torch.float64)):
        bad = int((~torch.isfinite(view)).sum())
        raise NonFiniteWeights(f"tensor {entry.name!r} has {bad} non-finite of {view.numel()} values; nothing was sent")
    end = entry.offset + entry.num_bytes
    buckets[entry.bucket][end : aligned(end)].zero_()


class Staging:
    """Where a subscriber receives an update before it touches the engine."""

    def __init__(self) -> None:
        self.manifest = Manifest((), ())
        self.buckets: list[torch.Tensor] = []

    def prepare(self, manifest: Manifest) -> None:
        """Make room for an update; keeps the buffers while the layout stays."""
        if manifest.bucket_sizes != self.manifest.bucket_sizes:
            self.buckets = [torch.empty(size, dtype=torch.uint8) for size in manifest.bucket_sizes]
        self.manifest = manifest

    def corrupt(self) -> list[str]:
        """Names of the tensors whose staged bytes are not what the manifest says."""
        held = {name: slice_digest(tensor) for name, tensor in self.tensors()}
        return self.manifest.differences(held)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The update as views into the buffers; whoever keeps them must copy."""
        for entry in self.manifest.entries:
            yield entry.name, view_of(self.buckets, entry)
