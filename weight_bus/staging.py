"""Memory that updates pass through, on the host or a GPU: packed on the publisher, staged on a subscriber.

Both sides reuse their buffers: from the third update on nothing is allocated.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from replay.channel import WireError
from weight_bus.digest import Digester, Launched, Part
from weight_bus.errors import NonFiniteWeights
from weight_bus.manifest import ALIGNMENT, Entry, Manifest, Planner, aligned

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HOST = torch.device("cpu")


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


def view_of(buckets: list[torch.Tensor], entry: Entry) -> torch.Tensor:
    """The tensor of `entry` as a view into its bucket (flat uint8)."""
    flat = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
    return flat.view(DTYPES[entry.dtype]).view(entry.shape)


class Packer:
    """Two alternating sets of buckets: one is sent and kept for joins while the other is filled.

    Costs twice the size of the model in the wire dtype, in host memory or, with a transport between GPUs, in the
    memory of learner rank 0's GPU. There, packing waits for the device once an update, at its end.
    """

    def __init__(self, bucket_bytes: int, device: torch.device = HOST, alignment: int = ALIGNMENT) -> None:
        self._bucket_bytes = bucket_bytes
        self._alignment = alignment
        self._device = device
        self._layout: Manifest | None = None
        self._sets: list[list[torch.Tensor]] = [[], []]

    def pack(
        self, named_tensors: Iterable[tuple[str, torch.Tensor | Pieces]], into: int
    ) -> tuple[Manifest, list[torch.Tensor]]:
        """Copy an update into set `into` (0 or 1). The copies have ended when this returns.

        Args:
            named_tensors: in wire dtype, on any device; each is read, on the current stream, before the next is
                asked for.
            into: the set that nobody reads now.

        Returns:
            The layout (without digests) and the buckets, flat uint8.

        Raises:
            NonFiniteWeights: a tensor holds NaN or infinity.
            ValueError: a tensor has no place (`Planner.place`), or names, dtypes or shapes differ from the first
                update's.
        """
        if self._layout is None:
            layout, buckets = self._fill_first(named_tensors)
        else:
            layout, buckets = self._layout, self._sets[into]
            if not buckets:
                pinned = any(bucket.is_pinned() for bucket in self._sets[1 - into])
                buckets.extend(self._new(size, pinned=pinned) for size in layout.bucket_sizes)
            _fill(named_tensors, layout, buckets)
        if not _looks_finite(layout, buckets):
            _find_non_finite(layout, buckets)
        self._layout, self._sets[into] = layout, buckets
        return layout, buckets

    def _fill_first(
        self, named_tensors: Iterable[tuple[str, torch.Tensor | Pieces]]
    ) -> tuple[Manifest, list[torch.Tensor]]:
        planner = Planner(self._bucket_bytes, self._alignment)
        buckets: list[torch.Tensor] = []
        for name, tensor in named_tensors:
            entry = planner.place(name, NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
            if entry.bucket == len(buckets):
                pinned = isinstance(tensor, torch.Tensor) and tensor.is_cuda and self._device == HOST
                buckets.append(self._new(aligned(max(self._bucket_bytes, entry.num_bytes)), pinned=pinned))
            _copy(tensor, view_of(buckets, entry))
        layout = planner.manifest()
        return layout, [bucket[:size] for bucket, size in zip(buckets, layout.bucket_sizes, strict=True)]

    def _new(self, size: int, *, pinned: bool) -> torch.Tensor:
        # zero, because the bytes between tensors travel too and are never written again
        return torch.zeros(size, dtype=torch.uint8, device=self._device, pin_memory=pinned)


def _fill(
    named_tensors: Iterable[tuple[str, torch.Tensor | Pieces]], layout: Manifest, buckets: list[torch.Tensor]
) -> None:
    entries = iter(layout.entries)
    for name, tensor in named_tensors:
        entry = next(entries, None)
        found = (name, NAMES.get(tensor.dtype), tuple(tensor.shape))
        if entry is None or found != (entry.name, entry.dtype, entry.shape):
            raise ValueError(f"the update has changed its layout: expected {entry}, got {found}")
        _copy(tensor, view_of(buckets, entry))
    left = next(entries, None)
    if left is not None:
        raise ValueError(f"the update ends before tensor {left.name!r}, which earlier updates carried")


def _copy(source: torch.Tensor | Pieces, target: torch.Tensor) -> None:
    if isinstance(source, torch.Tensor):
        target.copy_(source.detach())
        return
    parts = [part for part in source.parts if part.numel()]
    if sum(part.numel() for part in parts) != target.numel():
        raise ValueError(f"pieces of {[part.numel() for part in parts]} elements do not make up {source.shape}")
    if parts:
        torch._foreach_copy_(list(torch.split(target.view(-1), [part.numel() for part in parts])), parts)


def _looks_finite(layout: Manifest, buckets: list[torch.Tensor]) -> bool:
    """False if an element is NaN or infinite, or if finite ones are so large that their sum is not. Waits once."""
    dtypes: dict[int, set[str]] = {}
    for entry in layout.entries:
        dtypes.setdefault(entry.bucket, set()).add(entry.dtype)
    views = [buckets[index].view(DTYPES[next(iter(names))]) for index, names in dtypes.items() if len(names) == 1]
    views += [view_of(buckets, entry) for entry in layout.entries if len(dtypes[entry.bucket]) > 1]
    if not views:
        return True
    # float32, because a GPU then sums 2-byte numbers without a copy of them all
    return bool(torch.stack([view.sum(dtype=torch.float32) for view in views]).isfinite().all())


def _find_non_finite(layout: Manifest, buckets: list[torch.Tensor]) -> None:
    for entry in layout.entries:
        bad = int((~torch.isfinite(view_of(buckets, entry))).sum())
        if bad:
            values = math.prod(entry.shape)
            raise NonFiniteWeights(f"tensor {entry.name!r} has {bad} non-finite of {values} values; nothing was sent")


class Staging:
    """Where a subscriber receives an update before it touches the engine. Costs the model once, on `device`."""

    def __init__(self, device: torch.device = HOST) -> None:
        self._device = device
        self.manifest = Manifest((), ())
        self.buckets: list[torch.Tensor] = []
        self._digesters: tuple[tuple[Entry, ...], list[Digester]] = ((), [])
        """Of each bucket, and the layout that they are for."""
        self._launched: dict[int, Launched] = {}

    def prepare(self, manifest: Manifest) -> None:
        """Make room for an update; keeps the buffers while the layout stays.

        Raises:
            WireError: there is not so much memory.
        """
        self._launched.clear()
        if manifest.bucket_sizes != self.manifest.bucket_sizes:
            self._digesters = ((), [])
            self.buckets = []  # first, so that the old ones make room
            try:
                self.buckets = [self._empty(size) for size in manifest.bucket_sizes]
            except RuntimeError as error:  # of torch's allocators
                self.manifest = Manifest((), ())
                wanted = sum(manifest.bucket_sizes)
                raise WireError(f"a manifest of {wanted} bytes does not fit into the memory here: {error}") from error
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # kernels of other streams may still use what this was before
        self.manifest = manifest

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def digest(self, index: int) -> None:
        """Bucket `index` has come: on a GPU, begin to digest it while others are on their way."""
        self._launched[index] = self._of_buckets()[index].launch()

    def corrupt(self) -> list[str]:
        """Names of the tensors whose staged bytes are not what the manifest says. Waits for the device."""
        digesters = self._of_buckets()
        for index in range(len(digesters)):
            if index not in self._launched:
                self.digest(index)
        launched, self._launched = self._launched, {}
        sums = [value for index in range(len(digesters)) for value in launched[index].sums()]
        names = [entry.name for bucket in self.manifest.by_bucket() for entry in bucket]
        return self.manifest.differences(dict(zip(names, sums, strict=True)))

    def _of_buckets(self) -> list[Digester]:
        """A digester for each bucket of the present layout."""
        layout, digesters = self._digesters
        if layout != self.manifest.entries:
            by_bucket = self.manifest.by_bucket()
            digesters = [Digester(Part(view_of(self.buckets, entry)) for entry in bucket) for bucket in by_bucket]
            self._digesters = (self.manifest.entries, digesters)
        return digesters

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The update as views into the buffers; whoever keeps them must copy."""
        for entry in self.manifest.entries:
            yield entry.name, view_of(self.buckets, entry)
