"""What a weight update carries, in order, where each tensor lies in its bucket, and the digests of one version.

A layout is made once (names, dtypes, shapes never change within a run); `with_digests` adds what is new in a version.

    Example: three tensors of 64, 64 and 32 bytes in buckets of 128 bytes give
        Entry("a", ..., bucket=0, offset=0), Entry("b", ..., bucket=0, offset=64), Entry("c", ..., bucket=1, offset=0)
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    """One box of a logical tensor: all of it, as a rule. It is never split over buckets.

    Example: the lower half of a matrix [8, 3] has start (4, 0), shape (4, 3), whole (8, 3).
    """

    name: str
    dtype: str
    start: tuple[int, ...]  # its first index in the logical tensor
    shape: tuple[int, ...]
    whole: tuple[int, ...]  # shape of the logical tensor
    bucket: int
    offset: int

    @property
    def num_bytes(self) -> int:
        """Size on the wire."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """What every version of a run carries, and which tensors stay as they are: only their digests travel."""

    entries: tuple[Entry, ...]
    bucket_sizes: tuple[int, ...]
    kept: tuple[str, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Logical tensors in the order of their digests: those that travel, then the kept ones."""
        return (*dict.fromkeys(entry.name for entry in self.entries), *self.kept)

    @cached_property
    def id(self) -> str:
        """Of these very contents."""
        entries = [(e.name, e.dtype, e.start, e.shape, e.whole, e.bucket, e.offset) for e in self.entries]
        contents = json.dumps([entries, self.bucket_sizes, self.kept])
        return hashlib.blake2b(contents.encode(), digest_size=16).hexdigest()

    def by_bucket(self) -> list[list[Entry]]:
        """The entries of each bucket, in order."""
        buckets: list[list[Entry]] = [[] for _ in self.bucket_sizes]
        for entry in self.entries:
            buckets[entry.bucket].append(entry)
        return buckets

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return sum(self.bucket_sizes)

    def with_digests(self, digests: Mapping[str, int]) -> "Manifest":
        """One version. Raises ValueError unless there is exactly the digest of each of `names`."""
        if wrong := digests.keys() ^ self.names:
            raise ValueError(f"digests do not match the layout, first difference: {min(wrong)!r}")
        return Manifest(self, digests)


@dataclass(frozen=True)
class Manifest:
    """A layout and the digest of each logical tensor in one version."""

    layout: Layout
    digests: Mapping[str, int]

    @cached_property
    def digest(self) -> str:
        """One digest for the whole version; names the policy together with (incarnation, version)."""
        return combined(self.digests)

    def differences(self, held: Mapping[str, int]) -> list[str]:
        """Names whose digest in `held` is missing or not the manifest's; names that are too many."""
        wrong = [name for name, digest in self.digests.items() if held.get(name) != digest]
        return wrong + sorted(set(held) - set(self.digests))


NOTHING = Layout((), ()).with_digests({})
"""Before the first version."""


class Planner:
    """Lays out tensors one by one, as they are gathered: in buckets of at most `bucket_bytes`, or of a larger one.

    With `first_bytes` the first bucket has at most that, and each after it twice as much: the first one soon leaves.
    """

    def __init__(self, bucket_bytes: int, alignment: int = ALIGNMENT, first_bytes: int = 0) -> None:
        self._bucket_bytes, self._alignment = bucket_bytes, alignment
        self._limit = min(first_bytes or bucket_bytes, bucket_bytes)
        self._entries: dict[tuple[str, tuple[int, ...]], Entry] = {}
        self._tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._sizes: list[int] = []

    def place(
        self,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        start: tuple[int, ...] = (),
        whole: tuple[int, ...] = (),
    ) -> Entry:
        """The place of the next box: without `start` and `whole`, of a tensor as it is.

        Raises:
            ValueError: the box appears twice, is of a tensor with another dtype or shape, or is not inside it; the
                dtype cannot travel; or without gaps the box would begin inside an element.
        """
        start, whole = start or (0,) * len(shape), whole or shape
        if (name, start) in self._entries:
            raise ValueError(f"tensor {name!r} appears twice in the update")
        if dtype not in ITEM_SIZES:
            raise ValueError(f"tensor {name!r} has dtype {dtype}, the weight bus carries {sorted(ITEM_SIZES)}")
        inside = len(start) == len(shape) == len(whole)
        if not (inside and all(s >= 0 <= n <= w - s for s, n, w in zip(start, shape, whole, strict=True))):
            raise ValueError(f"tensor {name[:80]!r} of shape {[*whole]} has a box of shape {[*shape]} at {[*start]}")
        if self._tensors.setdefault(name, (dtype, whole)) != (dtype, whole):
            raise ValueError(f"tensor {name!r} appears as {self._tensors[name]} and as {(dtype, whole)}")
        size = math.prod(shape) * ITEM_SIZES[dtype]
        if not self._sizes or (self._sizes[-1] and self._sizes[-1] + size > self._limit):
            self._limit = min(2 * self._limit, self._bucket_bytes) if self._sizes else self._limit
            self._sizes.append(0)
        if self._sizes[-1] % ITEM_SIZES[dtype]:
            raise ValueError(
                f"tensor {name!r} of {dtype} would begin at byte {self._sizes[-1]} of a bucket without gaps"
                " (weight_bus.transport 'disk'); give all tensors one dtype, or take weight_bus.transport: collective"
            )
        entry = Entry(name, dtype, start, shape, whole, len(self._sizes) - 1, self._sizes[-1])
        self._entries[name, start] = entry
        self._sizes[-1] = aligned(self._sizes[-1] + size, self._alignment)
        return entry

    def layout(self, kept: Iterable[str] = ()) -> Layout:
        """The layout of everything placed so far. Raises ValueError: a kept tensor is among it, or comes twice."""
        layout = Layout(tuple(self._entries.values()), tuple(self._sizes), tuple(kept))
        if len(set(layout.names)) < len(layout.names):
            raise ValueError(f"of the kept tensors {[*layout.kept][:5]} one comes twice, or travels")
        return layout


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of the alignment."""
    return -(-num_bytes // alignment) * alignment


def plan(
    boxes: Iterable[tuple[Any, ...]],
    bucket_bytes: int,
    alignment: int = ALIGNMENT,
    kept: Iterable[str] = (),
    first_bytes: int = 0,
) -> Layout:
    """Lay boxes out in order: (name, dtype, shape[, start, whole]). Raises ValueError, see `Planner`."""
    planner = Planner(bucket_bytes, alignment, first_bytes)
    for box in boxes:
        planner.place(*box)
    return planner.layout(kept)
