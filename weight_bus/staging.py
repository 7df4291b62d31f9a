"""Memory in which a subscriber receives an update, on the host or a GPU. It is used again: only the first allocates."""

from collections.abc import Iterator, Sequence

import torch

from replay.channel import WireError
from weight_bus.digest import Digester, Launched, TensorSlice, add
from weight_bus.manifest import NOTHING, Entry, Manifest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HOST = torch.device("cpu")


def view_of(buckets: list[torch.Tensor], entry: Entry) -> torch.Tensor:
    """What `entry` says as a view into its bucket (flat uint8)."""
    return view_in(buckets[entry.bucket], entry)


def view_in(bucket: torch.Tensor, entry: Entry) -> torch.Tensor:
    """As `view_of`, of this bucket."""
    flat = bucket[entry.offset : entry.offset + entry.num_bytes]
    return flat.view(DTYPES[entry.dtype]).view(entry.shape)


class Staging:
    """Where an update is received before it touches the engine. Costs the model once, on the device of `prepare`.

    Its buckets outlive a subscriber: an engine has them mapped by then, and a second set would not fit beside them.

    Args:
        engine: the GPU that an update goes to, if any. It digests also what has come to host memory, which is pinned
            then, bucket by bucket in a copy: NumPy waits for the interpreter, which a scheduler's loop holds.
    """

    def __init__(self, engine: torch.device = HOST) -> None:
        self._device, self._engine = HOST, engine
        self.manifest = NOTHING
        self.buckets: list[torch.Tensor] = []
        self._copy: torch.Tensor | None = None  # of one bucket of host memory at a time, on the engine's device
        self._digesters: list[Digester] = []  # of each bucket, or of its copy
        self._launched: dict[int, Launched] = {}

    def prepare(self, manifest: Manifest, device: torch.device = HOST) -> None:
        """Make room for an update, anew for another layout or device. Raises WireError: there is no memory for it."""
        self._launched.clear()
        layout, before = manifest.layout, self.manifest.layout
        if layout.bucket_sizes != before.bucket_sizes or device != self._device:
            self._device, self._digesters, self.buckets = device, [], []  # first, so that the old ones make room
            self._copy = None
            try:
                self._allocate(layout.bucket_sizes)
            except RuntimeError as error:  # of torch's allocators
                self.manifest = NOTHING
                said = f"{layout.num_bytes} bytes of an update do not fit into the memory here: {error}"
                raise WireError(said) from error
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # kernels of other streams may still use what this was before
        if not self._digesters or layout.id != before.id:
            self._digesters = [
                Digester(TensorSlice(view_in(held, entry), entry.whole, entry.start) for entry in entries)
                for held, entries in zip(self._digested(), layout.by_bucket(), strict=True)
            ]
        self.manifest = manifest

    def _allocate(self, sizes: Sequence[int]) -> None:
        by_copies = self._device == HOST and self._engine.type == "cuda"
        self.buckets = [
            torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=by_copies) for size in sizes
        ]
        if by_copies and sizes:
            self._copy = torch.empty(max(sizes), dtype=torch.uint8, device=self._engine)

    def _digested(self) -> list[torch.Tensor]:
        """Where each bucket lies while it is digested."""
        return self.buckets if self._copy is None else [self._copy[: bucket.numel()] for bucket in self.buckets]

    def digest(self, index: int) -> None:
        """Bucket `index` has come: on a GPU, begin to digest it while others are on their way."""
        if self._copy is not None:  # in the order of the stream, after the digest of the one before
            self._copy[: self.buckets[index].numel()].copy_(self.buckets[index], non_blocking=True)
        self._launched[index] = self._digesters[index].launch()

    def corrupt(self) -> list[str]:
        """Names of the tensors whose staged bytes are not what the manifest says. Waits for the device."""
        kept = {name: self.manifest.digests[name] for name in self.manifest.layout.kept}
        return self.manifest.differences({**kept, **self.sums()})

    def sums(self) -> dict[str, int]:
        """Digests of the staged boxes, added up by tensor. Waits for the device."""
        buckets = range(len(self._digesters))
        for index in buckets:
            if index not in self._launched:
                self.digest(index)
        launched, self._launched = self._launched, {}
        sums = dict[str, int]()
        for index, entries in zip(buckets, self.manifest.layout.by_bucket(), strict=True):
            for entry, value in zip(entries, launched[index].sums(), strict=True):
                sums[entry.name] = add([sums.get(entry.name, 0), value])
        return sums

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The update as views into the buffers; copy them to keep them."""
        for entry in self.manifest.layout.entries:
            yield entry.name, view_of(self.buckets, entry)
