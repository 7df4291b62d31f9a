"""A version as what has changed since the one before (coding.py): when it travels so, and what both ends do.

The publisher codes against the bytes that it packed for the version before; a subscriber applies that to the bytes that
it staged then. One digest names those, another the change: a proven change of a proven base is a proven version,
without a look at all of it. (A bit that flips in between shows in the digests of the live weights, always taken whole.)
A receiver with another base, or whose last update failed, gets the full version; so do all when too much has changed,
and every weight_bus.full_every versions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from configs.infrastructure import WeightBus
from replay.channel import WireError
from weight_bus.delta import coding
from weight_bus.digest import slice_digest
from weight_bus.errors import NotAvailable, WeightBusError
from weight_bus.manifest import ITEM_SIZES, Layout

LEVEL = 1  # of zstd; 3 gains nothing on what coding.py makes and costs a quarter more time


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What leads from one version to the next, ready to send."""

    base: str  # digest of the version that it is to be applied to
    coded: torch.Tensor
    """Flat uint8, all buckets one after the other; compressed where zstd is asked for and makes it smaller."""
    num_bytes: int  # before compression
    digest: str  # of `coded`

    def described(self) -> dict[str, Any]:
        """The fields of Begin that say what comes."""
        sizes = {"wire_bytes": self.coded.numel(), "change_bytes": self.num_bytes}
        return {"base": self.base, "change_digest": self.digest, **sizes}

    def pieces(self, bucket_bytes: int) -> list[torch.Tensor]:
        """In broadcasts of at most `bucket_bytes`."""
        return list(torch.split(self.coded, bucket_bytes))


class ChangeMaker:
    """The publisher's side: decides version by version whether a change is worth sending."""

    def __init__(self, config: WeightBus) -> None:
        self._config = config
        self._since_full, self._skip, self._wait = 0, 0, 1
        """Versions since a full one, to send whole before the next attempt, and to skip after one in vain."""
        zstd = config.delta and config.compression == "zstd"
        self._packer = zstandard().ZstdCompressor(level=LEVEL) if zstd else None

    def due(self, base: str) -> bool:
        """Whether the next version may be a change of `base`, empty when there is none; to be asked once for each."""
        if not self._config.delta:
            return False
        self._since_full += 1
        if not base or self._since_full >= self._config.full_every:
            self._since_full = 0
            return False
        if self._skip:
            self._skip -= 1
            return False
        return True

    def change(
        self, base: str, old: Sequence[torch.Tensor], new: Sequence[torch.Tensor], layout: Layout
    ) -> Change | None:
        """The change from `old` to `new`, or None when this version is to be sent whole after all.

        Args:
            base: digest of the version whose bytes `old` are.
            old, new: buckets of `layout`, flat uint8, on the same device.

        Raises WeightBusError: zstd was asked for, and the buckets are on a GPU.
        """
        parts = [
            coding.encode(was, now, min(ITEM_SIZES[entry.dtype] for entry in entries))
            for was, now, entries in zip(old, new, layout.by_bucket(), strict=True)
        ]
        whole = coding.Coded(b"".join(part.headers for part in parts), [c for part in parts for c in part.columns])
        if whole.num_bytes >= coding.WORTH * layout.num_bytes:
            self._skip, self._wait = self._wait, min(2 * self._wait, self._config.full_every)
            return None
        self._wait = 1
        wire = coded = whole.joined(new[0].device)
        if self._packer is not None:
            if coded.is_cuda:
                needs = "zstd works on host memory (gloo, ucc, disk); take none with nccl"
                raise WeightBusError(f"weight_bus.compression: {needs}")
            packed = self._packer.compress(coded.numpy())
            if len(packed) < coded.numel():  # a reader takes what has its full size for uncompressed
                wire = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        return Change(base=base, coded=wire, num_bytes=coded.numel(), digest=digest_of(wire))


class ChangeReader:
    """A subscriber's side: room for what comes, and what it makes of the staged bytes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = torch.empty(0, dtype=torch.uint8, device=device)

    def room(self, num_bytes: int, bucket_bytes: int) -> list[torch.Tensor]:
        """Reused buffers for a change of that size, as it is broadcast. Raises WireError: there is no memory for it."""
        if self._room.numel() < num_bytes:
            try:
                self._room = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:  # of torch's allocators
                raise WireError(f"a change of {num_bytes} bytes does not fit into the memory here: {error}") from error
        return list(torch.split(self._room[:num_bytes], bucket_bytes))

    def arrived(self, wire_bytes: int, digest: str) -> bool:
        """Whether what lies in the room is the change that was announced by this digest."""
        return digest_of(self._room[:wire_bytes]) == digest

    def apply(self, buckets: Sequence[torch.Tensor], wire_bytes: int, num_bytes: int) -> None:
        """Turn the buckets of the base into those of the next version, in place. On a GPU that has ended then.

        Args:
            buckets: flat uint8, on this reader's device.
            wire_bytes, num_bytes: what has come into the room, and after decompression; the same when not compressed.

        Raises WireError: it cannot be what leads on from here, and nothing was written; or there is no memory to apply
            it, and the buckets may hold anything.
        """
        coded = self._room[:wire_bytes]
        try:
            coding.apply(buckets, coded if wire_bytes == num_bytes else _decompressed(coded, num_bytes))
        except torch.OutOfMemoryError as error:  # it takes ten bytes a changed element, beside an engine
            raise WireError(f"a change of {num_bytes} bytes cannot be applied in the memory here: {error}") from error
        if self._device.type == "cuda":
            # other processes read the buckets next, and another stream writes the room: neither waits for this one
            torch.cuda.current_stream(self._device).synchronize()


def digest_of(change: torch.Tensor) -> str:
    """Names the bytes of a change, as Begin carries it."""
    return f"{slice_digest(change):016x}"


def _decompressed(coded: torch.Tensor, num_bytes: int) -> torch.Tensor:
    library = zstandard()
    try:
        plain = library.ZstdDecompressor().decompress(coded.cpu().numpy(), max_output_size=num_bytes)
    except library.ZstdError as error:
        raise WireError(f"a compressed change of {coded.numel()} bytes: {error}") from error
    if len(plain) != num_bytes:
        raise WireError(f"a compressed change has {len(plain)} bytes, and {num_bytes} were announced")
    return torch.frombuffer(bytearray(plain), dtype=torch.uint8).to(coded.device)


def zstandard() -> Any:
    """The library. Raises NotAvailable where it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        raise NotAvailable(
            "weight_bus.compression: zstd needs the package zstandard; install the extra zstd, or take none"
        ) from error
    return zstandard
