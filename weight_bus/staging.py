"""Memory in which a subscriber receives an update, on the host or a GPU. It is used again: only the first allocates."""

from collections.abc import Iterator

import torch

from replay.channel import WireError
from weight_bus.digest import Digester, Launched, TensorSlice
from weight_bus.manifest import Entry, Manifest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HOST = torch.device("cpu")


def view_of(buckets: list[torch.Tensor], entry: Entry) -> torch.Tensor:
    """The tensor of `entry` as a view into its bucket (flat uint8)."""
    flat = buckets[entry.bucket][entry.offset : entry.offset + entry.num_bytes]
    return flat.view(DTYPES[entry.dtype]).view(entry.shape)


class Staging:
    """Where an update is received before it touches the engine. Costs the model once, on the device of `prepare`.

    Its buckets outlive a subscriber: an engine has them mapped by then, and a second set would not fit beside them.
    """

    def __init__(self) -> None:
        self._device = HOST
        self.manifest = Manifest((), ())
        self.buckets: list[torch.Tensor] = []
        self._digesters: list[Digester] = []  # of each bucket
        self._launched: dict[int, Launched] = {}

    def prepare(self, manifest: Manifest, device: torch.device = HOST) -> None:
        """Make room for an update, anew for another layout or device. Raises WireError: there is no memory for it."""
        self._launched.clear()
        if manifest.bucket_sizes != self.manifest.bucket_sizes or device != self._device:
            self._device, self._digesters, self.buckets = device, [], []  # first, so that the old ones make room
            try:
                self.buckets = [torch.empty(size, dtype=torch.uint8, device=device) for size in manifest.bucket_sizes]
            except RuntimeError as error:  # of torch's allocators
                self.manifest = Manifest((), ())
                wanted = sum(manifest.bucket_sizes)
                raise WireError(f"a manifest of {wanted} bytes does not fit into the memory here: {error}") from error
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # kernels of other streams may still use what this was before
        if not self._digesters or manifest.entries != self.manifest.entries:
            views = [[self._part(entry) for entry in bucket] for bucket in manifest.by_bucket()]
            self._digesters = [Digester(parts) for parts in views]
        self.manifest = manifest

    def digest(self, index: int) -> None:
        """Bucket `index` has come: on a GPU, begin to digest it while others are on their way."""
        self._launched[index] = self._digesters[index].launch()

    def corrupt(self) -> list[str]:
        """Names of the tensors whose staged bytes are not what the manifest says. Waits for the device."""
        buckets = range(len(self._digesters))
        for index in buckets:
            if index not in self._launched:
                self.digest(index)
        launched, self._launched = self._launched, {}
        sums = [value for index in buckets for value in launched[index].sums()]
        names = [entry.name for bucket in self.manifest.by_bucket() for entry in bucket]
        return self.manifest.differences({**self.manifest.kept, **dict(zip(names, sums, strict=True))})

    def _part(self, entry: Entry) -> TensorSlice:
        return TensorSlice(view_of(self.buckets, entry), entry.whole or None, entry.start or None)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The update as views into the buffers; copy them to keep them."""
        for entry in self.manifest.entries:
            yield entry.name, view_of(self.buckets, entry)
