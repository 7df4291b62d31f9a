"""Memory in which a subscriber receives an update, on the host or a GPU. It is used again: only the first allocates."""

from collections.abc import Iterator

import torch

from replay.channel import WireError
from weight_bus.digest import Digester, Launched, TensorSlice, add
from weight_bus.manifest import NOTHING, Entry, Manifest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HOST = torch.device("cpu")


def view_of(buckets: list[torch.Tensor], entry: Entry) -> torch.Tensor:
    """What `entry` says as a view into its bucket (flat uint8)."""
    flat = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
    return flat.view(DTYPES[entry.dtype]).view(entry.shape)


class Staging:
    """Where an update is received before it touches the engine. Costs the model once, on the device of `prepare`.

    Its buckets outlive a subscriber: an engine has them mapped by then, and a second set would not fit beside them.
    """

    def __init__(self) -> None:
        self._device = HOST
        self.manifest = NOTHING
        self.buckets: list[torch.Tensor] = []
        self._digesters: list[Digester] = []  # of each bucket
        self._launched: dict[int, Launched] = {}

    def prepare(self, manifest: Manifest, device: torch.device = HOST) -> None:
        """Make room for an update, anew for another layout or device. Raises WireError: there is no memory for it."""
        self._launched.clear()
        layout, before = manifest.layout, self.manifest.layout
        if layout.bucket_sizes != before.bucket_sizes or device != self._device:
            self._device, self._digesters, self.buckets = device, [], []  # first, so that the old ones make room
            try:
                self.buckets = [torch.empty(size, dtype=torch.uint8, device=device) for size in layout.bucket_sizes]
            except RuntimeError as error:  # of torch's allocators
                self.manifest = NOTHING
                said = f"{layout.num_bytes} bytes of an update do not fit into the memory here: {error}"
                raise WireError(said) from error
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # kernels of other streams may still use what this was before
        if not self._digesters or layout.id != before.id:
            self._digesters = [
                Digester(TensorSlice(view_of(self.buckets, entry), entry.whole, entry.start) for entry in bucket)
                for bucket in layout.by_bucket()
            ]
        self.manifest = manifest

    def digest(self, index: int) -> None:
        """Bucket `index` has come: on a GPU, begin to digest it while others are on their way."""
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
