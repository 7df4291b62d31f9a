"""Position-keyed digests of tensors that add up over slices (invariant 5).

The digest of a logical tensor is  sum over elements of mix(bits of the element, its flat index)  mod 2^64.
A sum over elements does not care who holds which slice: FSDP shards, tensor-parallel slices and rows of a
fused projection each digest what they hold, in place, and the parts are added. Keying by position makes
swapped elements visible, which a plain XOR or sum is blind to. mix is a multiply-xorshift finaliser in the
manner of SplitMix64 (Steele, Lea, Flood 2014).

The code here is the definition. Tensors on a CUDA device take the same arithmetic as one kernel
(weight_bus/digest_cuda.py), `slice_digests` with a single wait for all of them.
"""

import functools
import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)

MASK = (1 << 64) - 1
CHUNK = 1 << 17
"""Elements at once: what a few int64 copies of them need still fits into a core's cache, 3 times as fast as beyond."""

INDEX_KEY = 0x9E3779B97F4A7C15
BITS_KEY = 0xD1B54A32D192ED03
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
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


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _xorshift(h: torch.Tensor, shift: int) -> torch.Tensor:
    """h ^ (h >> shift) with a logical shift, on int64 in place."""
    return h.bitwise_xor_((h >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def _mixed_sum(bits: torch.Tensor, index: torch.Tensor) -> int:
    h = bits.to(torch.int64, copy=True).mul_(_signed(BITS_KEY)).add_((index + 1).mul_(_signed(INDEX_KEY)))
    _xorshift(h, 30).mul_(_signed(MIX_1))
    _xorshift(h, 27).mul_(_signed(MIX_2))
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
    return slice_digests([Part(part, full_shape, start)])[0]


def slice_digests(parts: Iterable[Part]) -> list[int]:
    """`slice_digest` of each part, in order. On a CUDA device all are launched first and awaited once.

    What is on a device must stay unchanged until this returns; work that was queued on the current stream before
    is waited for by the device itself.
    """
    totals: list[int] = []
    launched: dict[torch.device, list[tuple[int, Part]]] = defaultdict(list)
    for number, part in enumerate(parts):
        on_device = part.tensor.is_cuda and part.tensor.numel() > 0 and _kernel() is not None
        totals.append(0 if on_device else reference_digest(part))
        if on_device:
            launched[part.tensor.device].append((number, part))
    for device, batch in launched.items():
        for (number, _), total in zip(batch, _device_digests(device, [part for _, part in batch]), strict=True):
            totals[number] = total
    return totals


def _device_digests(device: torch.device, parts: list[Part]) -> list[int]:
    kernel = _kernel()
    assert kernel is not None
    sums = torch.zeros(len(parts), dtype=torch.int64, device=device)
    totals = []
    for number, part in enumerate(parts):
        rounded = None if part.rounded == part.tensor.dtype else part.rounded
        if rounded is not None and (part.tensor.dtype, rounded.itemsize) != (torch.float32, 2):
            part, rounded = part._replace(tensor=part.tensor.to(rounded)), None  # the kernel only narrows float32
        rows = rows_of(part)
        if rows is None:
            totals.append(reference_digest(part))
        else:
            kernel(rows, sums, number, rounded)
            totals.append(0)
    return [(total + on_device) & MASK for total, on_device in zip(totals, sums.tolist(), strict=True)]


@functools.cache
def _kernel() -> Callable[[Rows, torch.Tensor, int, torch.dtype | None], None] | None:
    """The kernel for CUDA tensors; None where Triton is not installed."""
    try:
        from weight_bus.digest_cuda import add_digest
    except ImportError as error:
        log.warning("digests of CUDA tensors take the slow path: Triton is not usable (%s); install triton", error)
        return None
    return add_digest


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
    """`slice_digest` in torch operations, chunk by chunk, on any device. What the kernel is tested against."""
    part, shape, begin = _located(whole_part)
    rounded = whole_part.rounded or part.dtype
    if part.numel() == 0:
        return 0
    row_size = math.prod(part.shape[1:])
    first = begin[0] * math.prod(shape[1:])
    whole_rows = tuple(part.shape[1:]) == tuple(shape[1:])
    total = 0
    rows_per_chunk = max(1, CHUNK // max(1, row_size))
    for row in range(0, part.shape[0], rows_per_chunk):
        piece = part[row : row + rows_per_chunk].to(rounded).contiguous()
        bits = piece.view(VIEWS[piece.element_size()]).reshape(-1)
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
