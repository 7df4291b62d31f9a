"""Digests of many tensors at once, each by the fastest way there is to the definition's sums.

Tensors on a CUDA device take one Triton kernel for all of them, and a single wait. Contiguous ones in host memory take
NumPy, unless torch has threads to outdo that: a logical shift is one operation there, and every intermediate result has
its place in the cache. Where a machine has many cores, threads share them: NumPy computes without the GIL, in longer
operations then. All others, and all without Triton, take the definition itself.
"""

import functools
import itertools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import torch

from weight_bus.digest.definition import (
    MASK,
    SHARED_CHUNK,
    DigestTask,
    StridedRows,
    TensorSlice,
    add,
    all_rows,
    host_digest,
    rows_digest,
)

if TYPE_CHECKING:
    from weight_bus.digest.device import DigestPlan

log = logging.getLogger(__name__)

TORCH_THREADS = 3
"""From so many on, torch is faster than a thread of NumPy, which takes half to three quarters of the CPU time."""
HOST_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 4))
"""Of NumPy: a quarter of the cores, for engines, learner ranks and replay of this machine keep some each busy."""
PIECE = 1 << 22
"""Elements that a thread takes at a time, some 10 ms."""


def slice_digest(
    part: torch.Tensor, full_shape: Sequence[int] | None = None, start: Sequence[int] | None = None
) -> int:
    """Digest of a slice, as in `TensorSlice`: a number below 2^64. Those of disjoint slices `add` up to the whole's."""
    return slice_digests([TensorSlice(part, full_shape, start)])[0]


def slice_digests(parts: Iterable[TensorSlice]) -> list[int]:
    """`slice_digest` of each part, in order. On a CUDA device all are launched first and awaited once.

    What is on a device must stay unchanged until this returns; the device waits for earlier work on the current stream.
    """
    return Digester(parts).launch().sums()


class Digester:
    """Digests of the same parts, again and again: what is worked out once takes longer than the kernel itself."""

    def __init__(self, parts: Iterable[TensorSlice]) -> None:
        self._parts = list(parts)
        self._copied: list[int] = []  # of which the kernel takes a copy, made anew each time
        self._without_kernel: list[int] = []
        tasks: dict[torch.device, list[DigestTask]] = defaultdict(list)
        for number, part in enumerate(self._parts):
            if not part.tensor.is_cuda or _kernel() is None:
                self._without_kernel.append(number)
            elif found := self._tasks(number):
                memory = part.tensor.untyped_storage().data_ptr()
                if all(task.rows.values.untyped_storage().data_ptr() == memory for task in found):
                    tasks[part.tensor.device] += found
                else:
                    self._copied.append(number)
        self._plans = [self._plan(batch) for batch in tasks.values()]

    def launch(self) -> "Launched":
        """Begin to digest; what is on a device must stay unchanged until the sums are there."""
        plans = self._plans + [self._plan(self._tasks(number)) for number in self._copied]
        sums = [plan.launch() for plan in plans]
        totals = [0] * len(self._parts)
        plain = _plain_digests([self._parts[number] for number in self._without_kernel])
        for number, total in zip(self._without_kernel, plain, strict=True):
            totals[number] = total
        return Launched(totals, sums)

    def _tasks(self, number: int) -> list[DigestTask]:
        """What the kernel is to do for a part."""
        part = self._parts[number]
        rounded = None if part.rounded == part.tensor.dtype else part.rounded
        if rounded is not None and (part.tensor.dtype, rounded.itemsize) != (torch.float32, 2):
            part, rounded = part._replace(tensor=part.tensor.to(rounded)), None  # the kernel only narrows float32
        return [DigestTask(rows, number, rounded) for rows in all_rows(part)]

    def _plan(self, tasks: list[DigestTask]) -> "DigestPlan":
        kernel = _kernel()
        assert kernel is not None
        return kernel(tasks, len(self._parts), tasks[0].rows.values.device)


class Launched(NamedTuple):
    """Digests under way."""

    totals: list[int]  # by part; of those that are done already
    under_way: list[torch.Tensor]  # int64 on a device, by part; to be added

    def sums(self) -> list[int]:
        """Wait, and say what they are, by part."""
        totals = self.totals
        for sums in self.under_way:
            totals = [(total + on_device) & MASK for total, on_device in zip(totals, sums.tolist(), strict=True)]
        return totals


@functools.cache
def _kernel() -> "Callable[[Sequence[DigestTask], int, torch.device], DigestPlan] | None":
    """Plans for CUDA tensors; None where Triton is not installed."""
    try:
        from weight_bus.digest.device import DigestPlan
    except ImportError as error:
        log.warning("digests of CUDA tensors take the slow path: Triton is not usable (%s); install triton", error)
        return None
    return DigestPlan


def _plain_digests(parts: Sequence[TensorSlice]) -> list[int]:
    """Digests of parts that no kernel takes."""
    numpy = torch.get_num_threads() < TORCH_THREADS * HOST_THREADS
    totals, pieces = [0] * len(parts), list[tuple[int, StridedRows, torch.dtype]]()
    for number, part in enumerate(parts):
        rows, rounded = all_rows(part), part.rounded or part.tensor.dtype
        if numpy and part.tensor.device.type == "cpu" and all(len(row.values) == 1 for row in rows):
            pieces += [(number, piece, rounded) for row in rows for piece in _pieces(row)]
        else:
            totals[number] = add([rows_digest(row, rounded) for row in rows])
    for (number, _, _), digest in zip(pieces, _host_digests(pieces), strict=True):
        totals[number] = add([totals[number], digest])
    return totals


def _pieces(row: StridedRows) -> Iterator[StridedRows]:
    """A single row, cut for threads."""
    values, base, step = row
    for begin in range(0, values.shape[1], PIECE):
        yield StridedRows(values[:, begin : begin + PIECE], base + begin, step)


def _host_digests(pieces: Sequence[tuple[int, StridedRows, torch.dtype]]) -> list[int]:
    rows, dtypes = [row for _, row, _ in pieces], [dtype for _, _, dtype in pieces]
    if HOST_THREADS == 1 or sum(row.values.numel() for row in rows) <= PIECE:
        return list(map(host_digest, rows, dtypes))
    with ThreadPoolExecutor(HOST_THREADS, "digest") as threads:
        return list(threads.map(host_digest, rows, dtypes, itertools.repeat(SHARED_CHUNK)))
