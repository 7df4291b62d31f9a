"""Position-keyed digests of tensors that add up over slices (invariant 5).

The digest of a logical tensor is  sum over elements of mix(bits of the element, its flat index)  mod 2^64.
A sum over elements is independent of which process holds which slice: FSDP shards, tensor-parallel slices and rows of a
fused projection each digest what they hold, in place, and the parts are added. Keying by position makes
swapped elements visible, which a plain XOR or sum is blind to.

mix is a multiply-xorshift finaliser in 32 bits, with the constants of Wellons' "lowbias32" (Hash Function Prospector,
2018), read as a signed number. For a fixed position it is a bijection of the bits of an element of up to four bytes, so
one changed element always changes the digest; several changed ones do not with a chance of about 2^-32. Positions
count modulo 2^32. In 64 bits it cost an H200 three times as much (bound by integer arithmetic), for no more than that.

The code here is the definition, in torch operations on any device. Two faster ways to the same sums are chosen in
digester.py: host.py in NumPy, and device.py as a Triton kernel.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

MASK = (1 << 64) - 1
CHUNK = 1 << 17
"""Elements at once: what a few int64 copies of them need still fits into a core's cache, 3 times as fast as beyond."""
INDEX_KEY = 0x85EBCA77
BITS_KEY = 0x9E3779B1
HIGH_KEY = 0xC2B2AE3D
"""For the upper half of eight-byte elements."""
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B
VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Part(NamedTuple):
    """A slice of a logical tensor, as the arguments of `slice_digest`."""

    tensor: torch.Tensor
    full_shape: Sequence[int] | None = None
    start: Sequence[int] | None = None
    rounded: torch.dtype | None = None
    """Digest the elements as they are after a cast to this dtype, such as a float32 master weight in bfloat16."""


class Rows(NamedTuple):
    """A slice in two dimensions: element (r, c) has the flat index `base + r * row_step + c`."""

    values: torch.Tensor
    """[rows, columns]; the columns contiguous in memory."""
    base: int
    row_step: int


class Stretch(NamedTuple):
    """Consecutive elements of a tensor."""

    values: torch.Tensor
    """Flat and contiguous."""
    first: int
    """Flat index of the first one."""
    rounded: torch.dtype
    """See `Part`; the dtype of the values leaves them as they are."""


class Task(NamedTuple):
    """What the kernel is to digest."""

    rows: Rows
    """Not empty."""
    slot: int
    """Which sum to add it to."""
    rounded: torch.dtype | None
    """Digest float32 elements as if they had been rounded to this dtype; None takes the bits as they are."""


def _signed(value: int) -> int:
    """The int32 with these bits."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _xorshift(h: torch.Tensor, shift: int) -> torch.Tensor:
    """h ^ (h >> shift) with a logical shift, on int32 in place."""
    return h.bitwise_xor_((h >> shift).bitwise_and_((1 << (32 - shift)) - 1))


def mix(bits: torch.Tensor, keyed: torch.Tensor) -> torch.Tensor:
    """Of each element, int32: a digest is the sum of these as signed numbers.

    Args:
        bits: the elements as integers of their width (one byte: unsigned).
        keyed: what `keys` makes of their flat indices.
    """
    if bits.dtype == torch.int64:
        bits = (bits >> 32).to(torch.int32).mul_(_signed(HIGH_KEY)).add_(bits.to(torch.int32))
    h = bits.to(torch.int32, copy=True).mul_(_signed(BITS_KEY)).add_(keyed)
    _xorshift(h, 16).mul_(_signed(MIX_1))
    _xorshift(h, 15).mul_(_signed(MIX_2))
    return _xorshift(h, 16)


def keys(index: torch.Tensor) -> torch.Tensor:
    """The term of flat indices (int64) in `mix`: (index + 1) * INDEX_KEY, int32."""
    return (index + 1).mul_(INDEX_KEY).to(torch.int32)


def _sum(mixed: torch.Tensor) -> int:
    return int(mixed.sum(dtype=torch.int64)) & MASK


@functools.cache
def _lanes(device: torch.device) -> torch.Tensor:
    """The index's term of the first CHUNK elements, less its constant."""
    return torch.arange(CHUNK, dtype=torch.int32, device=device).mul_(_signed(INDEX_KEY))


def rows_of(part: Part) -> Rows | None:
    """A part in two dimensions, sharing its memory if its columns are contiguous there.

    None when more than one dimension besides the first is cut: then its flat indices are no arithmetic of rows.
    """
    tensor, shape, begin = _located(part)
    cut = [dim for dim in range(1, len(shape)) if tensor.shape[dim] != shape[dim]]
    if len(cut) > 1:
        return None
    split = cut[0] if cut else min(1, len(shape) - 1)
    row_step = math.prod(shape[split:])
    base = begin[0] * math.prod(shape[1:])
    if cut:
        base += begin[split] * math.prod(shape[split + 1 :])
    values = _flattened(tensor, math.prod(tensor.shape[:split]), math.prod(tensor.shape[split:]))
    return Rows(values, base, row_step)


def _flattened(tensor: torch.Tensor, num_rows: int, cols: int) -> torch.Tensor:
    """A [num_rows, cols] view, or a copy where the memory does not allow a view with contiguous columns."""
    try:
        flat = tensor.view(num_rows, cols)
    except RuntimeError:  # its strides do not fit
        return tensor.contiguous().view(num_rows, cols)
    return flat if cols == 1 or flat.stride(1) == 1 else flat.contiguous()


def _located(part: Part) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Tensor, shape of the whole and begin, with at least one dimension."""
    shape = tuple(part.full_shape) if part.full_shape is not None else tuple(part.tensor.shape)
    begin = tuple(part.start) if part.start is not None else (0,) * len(shape)
    return (part.tensor, shape, begin) if shape else (part.tensor.reshape(1), (1,), (0,))


def reference_digest(whole_part: Part) -> int:
    """`slice_digest` in torch operations, chunk by chunk. What the faster ways are tested against."""
    part, shape, begin = _located(whole_part)
    rounded = whole_part.rounded or part.dtype
    if part.numel() == 0:
        return 0
    row_size = math.prod(part.shape[1:])
    stretch = stretch_of(whole_part)
    if stretch is not None:
        return _stretch_digest(stretch)
    total = 0
    rows_per_chunk = max(1, CHUNK // max(1, row_size))
    for row in range(0, part.shape[0], rows_per_chunk):
        piece = part[row : row + rows_per_chunk].to(rounded).contiguous()
        bits = piece.view(VIEWS[piece.element_size()]).reshape(-1)
        index = _strided_index(piece.shape, shape, (begin[0] + row, *begin[1:]), part.device)
        total += _sum(mix(bits, keys(index)))
    return total & MASK


def stretch_of(whole_part: Part) -> Stretch | None:
    """A part as one row in its memory; None when it is not one."""
    part, shape, begin = _located(whole_part)
    if tuple(part.shape[1:]) != tuple(shape[1:]) or not part.is_contiguous():
        return None
    return Stretch(part.view(-1), begin[0] * math.prod(shape[1:]), whole_part.rounded or part.dtype)


def _stretch_digest(stretch: Stretch) -> int:
    """In torch, on any device."""
    values, first, rounded = stretch
    lanes, total = _lanes(values.device), 0
    for begin in range(0, values.numel(), CHUNK):
        piece = values[begin : begin + CHUNK].to(rounded)
        keyed = lanes[: piece.numel()] + _signed((first + begin + 1) * INDEX_KEY)
        total += _sum(mix(piece.view(VIEWS[piece.element_size()]), keyed))
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
