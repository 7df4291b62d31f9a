"""Position-keyed digests of tensors that add up over slices (invariant 5).

The digest of a logical tensor is  sum over elements of mix(bits of the element, its flat index)  mod 2^64.
A sum over elements does not care who holds which slice: FSDP shards, tensor-parallel slices and rows of a
fused projection each digest what they hold, in place, and the parts are added. Keying by position makes
swapped elements visible, which a plain XOR or sum is blind to. mix is a multiply-xorshift finaliser in the
manner of SplitMix64 (Steele, Lea, Flood 2014).
"""

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch

MASK = (1 << 64) - 1
CHUNK = 1 << 22

_INDEX_KEY = 0x9E3779B97F4A7C15
_BITS_KEY = 0xD1B54A32D192ED03
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _xorshift(h: torch.Tensor, shift: int) -> torch.Tensor:
    """h ^ (h >> shift) with a logical shift, on int64 in place."""
    return h.bitwise_xor_((h >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mixed_sum(bits: torch.Tensor, index: torch.Tensor) -> int:
    h = bits.to(torch.int64).mul_(_signed(_BITS_KEY)).add_((index + 1).mul_(_signed(_INDEX_KEY)))
    _xorshift(h, 30).mul_(_signed(_MIX_1))
    _xorshift(h, 27).mul_(_signed(_MIX_2))
    return int(_xorshift(h, 31).sum()) & MASK


def slice_digest(
    part: torch.Tensor, full_shape: Sequence[int] | None = None, start: Sequence[int] | None = None
) -> int:
    """Digest of the slice `part` that begins at `start` in a logical tensor of `full_shape`.

    Args:
        part: the elements held here, any dtype of 1, 2, 4 or 8 bytes, any device, any strides.
        full_shape: shape of the whole tensor; none says that `part` is all of it.
        start: first index of the slice in each dimension; none is the origin.

    Returns:
        A number below 2^64. Digests of disjoint slices add up (`add`) to the digest of the whole.
    """
    shape = tuple(full_shape) if full_shape is not None else tuple(part.shape)
    begin = tuple(start) if start is not None else (0,) * len(shape)
    if part.numel() == 0:
        return 0
    if part.dim() == 0:
        part, shape, begin = part.reshape(1), (1,), (0,)
    row_size = math.prod(part.shape[1:])
    first = begin[0] * math.prod(shape[1:])
    whole_rows = tuple(part.shape[1:]) == tuple(shape[1:])
    total = 0
    rows_per_chunk = max(1, CHUNK // max(1, row_size))
    for row in range(0, part.shape[0], rows_per_chunk):
        piece = part[row : row + rows_per_chunk].contiguous()
        bits = piece.view(_VIEWS[piece.element_size()]).reshape(-1)
        if whole_rows:
            offset = first + row * row_size
            index = torch.arange(offset, offset + bits.numel(), dtype=torch.int64, device=part.device)
        else:
            index = _strided_index(piece.shape, shape, (begin[0] + row, *begin[1:]), part.device)
        total += _mixed_sum(bits, index)
    return total & MASK


def _strided_index(
    part_shape: Sequence[int], full_shape: Sequence[int], start: Sequence[int], device: torch.device
) -> torch.Tensor:
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(part_shape):
        axis = torch.arange(start[dim], start[dim] + size, dtype=torch.int64, device=device)
        index = index.unsqueeze(-1) * full_shape[dim] + axis
    return index.reshape(-1)


def add(parts: Sequence[int]) -> int:
    """Digest of a tensor from the digests of its disjoint slices."""
    return sum(parts) & MASK


def combined(digests: Mapping[str, int]) -> str:
    """One digest (32 hex digits) for a whole model, from the digests of its tensors by name."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(digests):
        state.update(f"{name}={digests[name]:016x}\n".encode())
    return state.hexdigest()
