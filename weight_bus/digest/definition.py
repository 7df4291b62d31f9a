"""Position-keyed digests of tensors that add up over slices (invariant 5).

The digest of a logical tensor is  sum over elements of mix(bits of the element, its flat index)  mod 2^64.
A sum does not depend on which process holds which slice: FSDP shards, tensor-parallel slices and rows of a fused
projection each digest what they hold, in place, and the parts are added. Keyed by position, it shows swapped elements.

mix is a multiply-xorshift finaliser in 32 bits, with the constants of Wellons' "lowbias32" (Hash Function Prospector,
2018), read as a signed number. For a fixed position it is a bijection of the bits of an element of up to four bytes, so
one changed element always changes the digest; several changed ones do not with a chance of about 2^-32. Positions
count modulo 2^32. In 64 bits it cost an H200 three times as much (bound by integer arithmetic), for no more than that.

`rows_digest` is the definition, in torch operations on any device. Two faster ways to the same sums are chosen in
digester.py: NumPy, and a Triton kernel (device.py).
"""

import functools
import hashlib
import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

MASK = (1 << 64) - 1
CHUNK = 1 << 17
"""Elements at once: what a few int64 copies of them need still fits into a core's cache, 3 times as fast as beyond."""
HOST_CHUNK = 1 << 16
"""The same in NumPy."""
SHARED_CHUNK = 1 << 18
"""The same for several threads: each operation takes the GIL anew, and they wait for it where that is often."""
INDEX_KEY = 0x85EBCA77
BITS_KEY = 0x9E3779B1
HIGH_KEY = 0xC2B2AE3D  # for the upper half of eight-byte elements
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B
VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorSlice(NamedTuple):
    """A slice of a logical tensor."""

    tensor: torch.Tensor  # the elements held here, any dtype of 1, 2, 4 or 8 bytes, any device, any strides
    full_shape: Sequence[int] | None = None  # of the whole tensor; None says that this is all of it
    start: Sequence[int] | None = None  # first index of the slice in each dimension; None is the origin
    rounded: torch.dtype | None = None
    """Digest the elements as they are after a cast to this dtype, such as a float32 master weight in bfloat16."""


class StridedRows(NamedTuple):
    """A slice in two dimensions: element (r, c) has the flat index `base + r * row_step + c`."""

    values: torch.Tensor
    """[rows, columns]; the columns contiguous in memory. Rows that follow each other everywhere are one."""
    base: int
    row_step: int


class DigestTask(NamedTuple):
    """What the kernel is to digest."""

    rows: StridedRows  # not empty
    slot: int  # which sum to add it to
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

    `bits` are the elements as integers of their width (one byte: unsigned), `keyed` (flat index + 1) * INDEX_KEY.
    """
    if bits.dtype == torch.int64:
        bits = (bits >> 32).to(torch.int32).mul_(_signed(HIGH_KEY)).add_(bits.to(torch.int32))
    h = bits.to(torch.int32, copy=True).mul_(_signed(BITS_KEY)).add_(keyed)
    _xorshift(h, 16).mul_(_signed(MIX_1))
    _xorshift(h, 15).mul_(_signed(MIX_2))
    return _xorshift(h, 16)


@functools.cache
def _lanes(device: torch.device, size: int) -> torch.Tensor:
    """The index's term of the first `size` elements, less its constant."""
    return torch.arange(size, dtype=torch.int32, device=device).mul_(_signed(INDEX_KEY))


def reference_digest(part: TensorSlice) -> int:
    """`slice_digest` in torch operations, chunk by chunk. What the faster ways are tested against."""
    return add([rows_digest(rows, part.rounded or part.tensor.dtype) for rows in all_rows(part)])


def rows_digest(rows: StridedRows, rounded: torch.dtype) -> int:
    """The digest of rows, in torch on any device; `rounded`: see `TensorSlice`, the dtype of the values leaves them."""
    values, base, row_step = rows
    num_rows, cols = values.shape
    lanes, total, at_once = _lanes(values.device, CHUNK), 0, max(1, CHUNK // cols)
    for row in range(0, num_rows, at_once):
        begins = torch.arange(row, min(row + at_once, num_rows), device=values.device).mul_(row_step).add_(base + 1)
        for col in range(0, cols, CHUNK):
            piece = values[row : row + at_once, col : col + CHUNK].to(rounded)
            keyed = (begins + col).mul_(INDEX_KEY).to(torch.int32).unsqueeze(1) + lanes[: piece.shape[1]]
            total += int(mix(piece.view(VIEWS[piece.element_size()]), keyed).sum(dtype=torch.int64))
    return total & MASK


class _Scratch(threading.local):
    """What a thread computes in, in NumPy."""

    def __init__(self) -> None:
        self.mixed = self.shifted = np.empty(0, np.uint32)

    def of(self, size: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        if size > self.mixed.size:
            self.mixed, self.shifted = np.empty(size, np.uint32), np.empty(size, np.uint32)
        return self.mixed[:size], self.shifted[:size]


_scratch = _Scratch()


def host_digest(rows: StridedRows, rounded: torch.dtype, chunk: int = HOST_CHUNK) -> int:
    """`rows_digest` of a single row, in unsigned 32 bits, `chunk` elements at once."""
    (values,), first, _ = rows
    lanes, total = _lanes(values.device, chunk).numpy().view(np.uint32), 0
    for begin in range(0, values.numel(), chunk):
        piece = values[begin : begin + chunk].detach().to(rounded)
        bits = piece.view(VIEWS[piece.element_size()]).numpy()
        h, shifted = _scratch.of(bits.size)
        np.copyto(h.view(np.int32), bits, casting="unsafe")  # spreads signs, or keeps the lower half
        if bits.itemsize == 8:
            np.copyto(shifted, bits >> 32, casting="unsafe")
            h += np.multiply(shifted, np.uint32(HIGH_KEY), out=shifted)
        h *= np.uint32(BITS_KEY)
        h += lanes[: bits.size]
        h += np.uint32((first + begin + 1) * INDEX_KEY & 0xFFFFFFFF)
        h ^= np.right_shift(h, np.uint32(16), out=shifted)
        h *= np.uint32(MIX_1)
        h ^= np.right_shift(h, np.uint32(15), out=shifted)
        h *= np.uint32(MIX_2)
        h ^= np.right_shift(h, np.uint32(16), out=shifted)
        total += int(h.view(np.int32).sum(dtype=np.int64))
    return total & MASK


def all_rows(part: TensorSlice) -> list[StridedRows]:
    """A part in as few rows as can be; none where it is empty."""
    if not part.tensor.numel():
        return []
    rows = rows_of(part)
    if rows is not None:
        return [rows]
    tensor, shape, begin = _located(part)
    return [
        inner._replace(base=inner.base + (begin[0] + number) * math.prod(shape[1:]))
        for number, values in enumerate(tensor)
        for inner in all_rows(TensorSlice(values, shape[1:], begin[1:]))
    ]


def rows_of(part: TensorSlice) -> StridedRows | None:
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
    if values.stride(0) == values.shape[1] == row_step:
        values = values.view(1, -1)
    return StridedRows(values, base, row_step)


def _flattened(tensor: torch.Tensor, num_rows: int, cols: int) -> torch.Tensor:
    """A [num_rows, cols] view, or a copy where the memory does not allow a view with contiguous columns."""
    try:
        flat = tensor.view(num_rows, cols)
    except RuntimeError:  # its strides do not fit
        return tensor.contiguous().view(num_rows, cols)
    return flat if cols == 1 or flat.stride(1) == 1 else flat.contiguous()


def _located(part: TensorSlice) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Tensor, shape of the whole and begin, with at least one dimension."""
    shape = tuple(part.full_shape) if part.full_shape is not None else tuple(part.tensor.shape)
    begin = tuple(part.start) if part.start is not None else (0,) * len(shape)
    return (part.tensor, shape, begin) if shape else (part.tensor.reshape(1), (1,), (0,))


def add(parts: Sequence[int]) -> int:
    """Digest of a tensor from the digests of its disjoint slices."""
    return sum(parts) & MASK


def combined(digests: Mapping[str, int]) -> str:
    """One digest (32 hex digits) for a whole model, from the digests of its tensors by name."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(digests):
        state.update(f"{name}={digests[name]:016x}\n".encode())
    return state.hexdigest()
