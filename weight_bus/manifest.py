"""The manifest: what a weight update carries, in order, and where each tensor lies in its bucket.

Pure: no socket, no clock, no device. A manifest is made once per layout (names, dtypes, shapes never change
within a run); `with_digests` adds what is new in each version.

    Example: three tensors of 64, 64 and 32 bytes in buckets of 128 bytes give
        Entry("a", ..., bucket=0, offset=0), Entry("b", ..., bucket=0, offset=64), Entry("c", ..., bucket=1, offset=0)
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from weight_bus.digest import combined

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of an update. A tensor is never split over buckets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensor on the wire."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The ordered list of everything a weight update carries, and the digest of each tensor."""

    entries: tuple[Entry, ...]
    bucket_sizes: tuple[int, ...]
    digests: Mapping[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """One digest for the whole version; names the policy together with (incarnation, version)."""
        return combined(self.digests)

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return sum(self.bucket_sizes)

    def with_digests(self, digests: Mapping[str, int]) -> "Manifest":
        """The same layout with the digests of one version.

        Raises:
            ValueError: a tensor of the layout has no digest, or a digest has no tensor.
        """
        names = {entry.name for entry in self.entries}
        if names != set(digests):
            wrong = sorted(names ^ set(digests))
            raise ValueError(f"digests do not match the manifest, first difference: {wrong[0]!r}")
        return replace(self, digests=dict(digests))

    def differences(self, held: Mapping[str, int]) -> list[str]:
        """Names whose digest in `held` is missing or not the manifest's; names that are too many."""
        wrong = [e.name for e in self.entries if held.get(e.name) != self.digests.get(e.name)]
        return wrong + sorted(set(held) - {e.name for e in self.entries})


def plan(tensors: Iterable[tuple[str, str, tuple[int, ...]]], bucket_bytes: int) -> Manifest:
    """Lay tensors (name, dtype, shape) out in buckets of about `bucket_bytes`, in the given order.

    A tensor larger than `bucket_bytes` gets a bucket of its own.

    Raises:
        ValueError: a name appears twice or a dtype cannot travel.
    """
    entries: list[Entry] = []
    sizes: list[int] = []
    seen: set[str] = set()
    for name, dtype, shape in tensors:
        if name in seen:
            raise ValueError(f"tensor {name!r} appears twice in the update")
        if dtype not in ITEM_SIZES:
            raise ValueError(f"tensor {name!r} has dtype {dtype}, the weight bus carries {sorted(ITEM_SIZES)}")
        seen.add(name)
        size = math.prod(shape) * ITEM_SIZES[dtype]
        if not sizes or (sizes[-1] and sizes[-1] + size > bucket_bytes):
            sizes.append(0)
        entries.append(Entry(name, dtype, tuple(shape), len(sizes) - 1, sizes[-1]))
        sizes[-1] = -(-(sizes[-1] + size) // ALIGNMENT) * ALIGNMENT
    return Manifest(tuple(entries), tuple(sizes))
