"""Position-keyed digests of tensors that add up over slices (invariant 5).

The digest of a logical tensor is  sum over elements of mix(bits of the element, its flat index)  mod 2^64.
A sum over elements does not care who holds which slice: FSDP shards, tensor-parallel slices and rows of a
fused projection each digest what they hold, in place, and the parts are added. Keying by position makes
swapped elements visible, which a plain XOR or sum is blind to.

mix is a multiply-xorshift finaliser in 32 bits, with the constants of Wellons' "lowbias32" (Hash Function Prospector,
2018), read as a signed number. For a fixed position it is a bijection of the bits of an element of up to four bytes, so
one changed element always changes the digest; several changed ones do not with a chance of about 2^-32. Positions
count modulo 2^32. In 64 bits it cost an H200 three times as much (bound by integer arithmetic), for no more than that.

The code here is the definition. Tensors on a CUDA device take the same arithmetic as one kernel for all of them
(weight_bus/digest_cuda.py), `slice_digests` with a single wait. Contiguous ones in host memory take it in NumPy, where
a logical shift is one operation and every result has its place in the cache, unless torch has threads to outdo that.
"""

import functools
import hashlib
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from weight_bus.digest_cuda import Plan

log = logging.getLogger(__name__)

MASK = (1 << 64) - 1
CHUNK = 1 << 17
"""Elements at once: what a few int64 copies of them need still fits into a core's cache, 3 times as fast as beyond."""
HOST_CHUNK = 1 << 16
"""The same in NumPy."""
TORCH_THREADS = 3
"""From so many on, torch is faster than NumPy, which has one and takes half to three quarters of the CPU time."""

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
    return Digester(parts).launch().sums()


class Digester:
    """Digests of the same parts again and again, of what lies in their memory then.

    What can be worked out once is worked out here: for the tensors of a model on a GPU that takes longer than the
    kernel itself.
    """

    def __init__(self, parts: Iterable[Part]) -> None:
        self._parts = list(parts)
        self._copied: list[int] = []
        """Of which the kernel takes a copy, made anew each time."""
        self._without_kernel: list[int] = []
        tasks: dict[torch.device, list[Task]] = defaultdict(list)
        for number, part in enumerate(self._parts):
            task = self._task(number)
            if task is None:
                self._without_kernel.append(number)
            elif task.rows.values.untyped_storage().data_ptr() != part.tensor.untyped_storage().data_ptr():
                self._copied.append(number)
            else:
                tasks[part.tensor.device].append(task)
        self._plans = [self._plan(batch) for batch in tasks.values()]

    def launch(self) -> "Launched":
        """Begin to digest; what is on a device must stay unchanged until the sums are there."""
        sums = [plan.launch() for plan in self._plans]
        for number in self._copied:
            task = self._task(number)
            assert task is not None
            sums.append(self._plan([task]).launch())
        totals = [0] * len(self._parts)
        for number in self._without_kernel:
            totals[number] = _plain_digest(self._parts[number])
        return Launched(totals, sums)

    def _task(self, number: int) -> Task | None:
        """What the kernel is to do for a part; None where it takes the slow path."""
        part = self._parts[number]
        if not (part.tensor.is_cuda and part.tensor.numel() and _kernel() is not None):
            return None
        rounded = None if part.rounded == part.tensor.dtype else part.rounded
        if rounded is not None and (part.tensor.dtype, rounded.itemsize) != (torch.float32, 2):
            part, rounded = part._replace(tensor=part.tensor.to(rounded)), None  # the kernel only narrows float32
        rows = rows_of(part)
        return None if rows is None else Task(rows, number, rounded)

    def _plan(self, tasks: list[Task]) -> "Plan":
        kernel = _kernel()
        assert kernel is not None
        return kernel(tasks, len(self._parts), tasks[0].rows.values.device)


class Launched(NamedTuple):
    """Digests under way."""

    totals: list[int]
    """By part; of those that are done already."""
    under_way: list[torch.Tensor]
    """int64 on a device, by part; to be added."""

    def sums(self) -> list[int]:
        """Wait, and say what they are, by part."""
        totals = self.totals
        for sums in self.under_way:
            totals = [(total + on_device) & MASK for total, on_device in zip(totals, sums.tolist(), strict=True)]
        return totals


@functools.cache
def _kernel() -> "Callable[[Sequence[Task], int, torch.device], Plan] | None":
    """Plans for CUDA tensors; None where Triton is not installed."""
    try:
        from weight_bus.digest_cuda import Plan
    except ImportError as error:
        log.warning("digests of CUDA tensors take the slow path: Triton is not usable (%s); install triton", error)
        return None
    return Plan


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


def _plain_digest(part: Part) -> int:
    if part.tensor.device.type == "cpu" and torch.get_num_threads() < TORCH_THREADS:
        stretch = _stretch_of(part)
        if stretch is not None:
            return host_digest(stretch)
    return reference_digest(part)


def reference_digest(whole_part: Part) -> int:
    """`slice_digest` in torch operations, chunk by chunk, on any device. What the kernel is tested against."""
    part, shape, begin = _located(whole_part)
    rounded = whole_part.rounded or part.dtype
    if part.numel() == 0:
        return 0
    row_size = math.prod(part.shape[1:])
    stretch = _stretch_of(whole_part)
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


def _stretch_of(whole_part: Part) -> Stretch | None:
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


class _Scratch(threading.local):
    """What a thread computes in, in NumPy."""

    def __init__(self) -> None:
        self.mixed, self.shifted = np.empty(HOST_CHUNK, np.uint32), np.empty(HOST_CHUNK, np.uint32)


_scratch = _Scratch()


@functools.cache
def _host_lanes() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """`_lanes` in NumPy."""
    return np.arange(HOST_CHUNK, dtype=np.uint32) * np.uint32(INDEX_KEY)


def host_digest(stretch: Stretch) -> int:
    """`_stretch_digest` in NumPy, in unsigned 32 bits."""
    values, first, rounded = stretch
    total = 0
    for begin in range(0, values.numel(), HOST_CHUNK):
        piece = values[begin : begin + HOST_CHUNK].detach().to(rounded)
        bits = piece.view(VIEWS[piece.element_size()]).numpy()
        h, shifted = _scratch.mixed[: bits.size], _scratch.shifted[: bits.size]
        np.copyto(h.view(np.int32), bits, casting="unsafe")  # spreads signs, or keeps the lower half
        if bits.itemsize == 8:
            np.copyto(shifted, bits >> 32, casting="unsafe")
            h += np.multiply(shifted, np.uint32(HIGH_KEY), out=shifted)
        h *= np.uint32(BITS_KEY)
        h += _host_lanes()[: bits.size]
        h += np.uint32((first + begin + 1) * INDEX_KEY & 0xFFFFFFFF)
        h ^= np.right_shift(h, np.uint32(16), out=shifted)
        h *= np.uint32(MIX_1)
        h ^= np.right_shift(h, np.uint32(15), out=shifted)
        h *= np.uint32(MIX_2)
        h ^= np.right_shift(h, np.uint32(16), out=shifted)
        total += int(h.view(np.int32).sum(dtype=np.int64))
    return total & MASK


def add(parts: Sequence[int]) -> int:
    """Digest of a tensor from the digests of its disjoint slices."""
    return sum(parts) & MASK


def combined(digests: Mapping[str, int]) -> str:
    """One digest (32 hex digits) for a whole model, from the digests of its tensors by name."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(digests):
        state.update(f"{name}={digests[name]:016x}\n".encode())
    return state.hexdigest()
