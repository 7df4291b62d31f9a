"""The manifest: what a weight update carries, in order, and where each tensor lies in its bucket.

A layout is made once (names, dtypes, shapes never change within a run); `with_digests` adds what is new in a version.

    Example: three tensors of 64, 64 and 32 bytes in buckets of 128 bytes give
        Entry("a", ..., bucket=0, offset=0), Entry("b", ..., bucket=0, offset=64), Entry("c", ..., bucket=1, offset=0)
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from configs.infrastructure import WeightBus
from weight_bus.digest import combined

ITEM_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGNMENT = 64
WITHOUT_GAPS = 1
"""Alignment with which a bucket is its tensors end to end, as a safetensors file holds them."""


def alignment_of(config: WeightBus) -> int:
    """How tensors lie in their buckets."""
    return WITHOUT_GAPS if config.transport == "disk" else ALIGNMENT


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of an update, or a slice of one. It is never split over buckets."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    start: tuple[int, ...] = ()
    """Of a slice, where it begins in the tensor; `whole` is the tensor's shape. Both are empty where this is all."""
    whole: tuple[int, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the tensor on the wire."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The ordered list of everything a weight update carries, and the digest of each tensor.

    A digest without an entry is of a tensor that stays as it is: the engine must hold it, and it does not travel.
    """

    entries: tuple[Entry, ...]
    bucket_sizes: tuple[int, ...]
    digests: Mapping[str, int] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """One digest for the whole version; names the policy together with (incarnation, version)."""
        return combined(self.digests)

    def by_bucket(self) -> list[list[Entry]]:
        """The tensors of each bucket, in order."""
        buckets: list[list[Entry]] = [[] for _ in self.bucket_sizes]
        for entry in self.entries:
            buckets[entry.bucket].append(entry)
        return buckets

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return sum(self.bucket_sizes)

    @property
    def kept(self) -> dict[str, int]:
        """Digests of what stays as it is, by name."""
        sent = {entry.name for entry in self.entries}
        return {name: digest for name, digest in self.digests.items() if name not in sent}

    def with_digests(self, digests: Mapping[str, int], kept: Collection[str] = ()) -> "Manifest":
        """The same layout with the digests of one version; `kept` names those of tensors that stay as they are.

        Raises ValueError unless each is that of a tensor here, or of a kept one that is not here.
        """
        sent = {entry.name for entry in self.entries}
        wrong = sent.intersection(kept) or (sent.union(kept) ^ set(digests))
        if wrong:
            raise ValueError(f"digests do not match the manifest, first difference: {min(wrong)!r}")
        return replace(self, digests=dict(digests))

    def differences(self, held: Mapping[str, int]) -> list[str]:
        """Names whose digest in `held` is missing or not the manifest's; names that are too many."""
        wrong = [name for name, digest in self.digests.items() if held.get(name) != digest]
        return wrong + sorted(set(held) - set(self.digests))


class Planner:
    """Lays out tensors one by one, as they are gathered: in buckets of at most `bucket_bytes`, or of a larger one."""

    def __init__(self, bucket_bytes: int, alignment: int = ALIGNMENT) -> None:
        self._bucket_bytes, self._alignment = bucket_bytes, alignment
        self._entries: dict[str, Entry] = {}
        self._sizes: list[int] = []

    def place(self, name: str, dtype: str, shape: tuple[int, ...]) -> Entry:
        """The place of the next tensor.

        Raises:
            ValueError: the name appears twice, the dtype cannot travel, a size is negative, or without gaps the tensor
                would begin inside an element.
        """
        if name in self._entries:
            raise ValueError(f"tensor {name!r} appears twice in the update")
        if dtype not in ITEM_SIZES:
            raise ValueError(f"tensor {name!r} has dtype {dtype}, the weight bus carries {sorted(ITEM_SIZES)}")
        if any(axis < 0 for axis in shape):
            raise ValueError(f"tensor {name[:80]!r} has shape {[*shape]}")
        size = math.prod(shape) * ITEM_SIZES[dtype]
        if not self._sizes or (self._sizes[-1] and self._sizes[-1] + size > self._bucket_bytes):
            self._sizes.append(0)
        if self._sizes[-1] % ITEM_SIZES[dtype]:
            raise ValueError(
                f"tensor {name!r} of {dtype} would begin at byte {self._sizes[-1]} of a bucket without gaps"
                " (weight_bus.transport 'disk'); give all tensors one dtype, or take weight_bus.transport: collective"
            )
        self._entries[name] = entry = Entry(name, dtype, tuple(shape), len(self._sizes) - 1, self._sizes[-1])
        self._sizes[-1] = aligned(self._sizes[-1] + size, self._alignment)
        return entry

    def manifest(self) -> Manifest:
        """The layout of everything placed so far, without digests."""
        return Manifest(tuple(self._entries.values()), tuple(self._sizes))


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


def plan(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], bucket_bytes: int, alignment: int = ALIGNMENT
) -> Manifest:
    """Lay tensors (name, dtype, shape) out in order. Raises ValueError, see `Planner.place`."""
    planner = Planner(bucket_bytes, alignment)
    for name, dtype, shape in tensors:
        planner.place(name, dtype, shape)
    return planner.manifest()
