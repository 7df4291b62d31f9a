"""Digests of many tensors at once, each by the fastest way there is to the definition's sums.

Tensors on a CUDA device take one Triton kernel for all of them, and a single wait. Contiguous ones in host memory take
NumPy, unless torch has threads to outdo that. All others, and all without Triton, take the definition itself.
"""

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from weight_bus.digest.definition import MASK, Part, Task, reference_digest, rows_of, stretch_of
from weight_bus.digest.host import host_digest

if TYPE_CHECKING:
    from weight_bus.digest.device import Plan

log = logging.getLogger(__name__)

TORCH_THREADS = 3
"""From so many on, torch is faster than NumPy, which has one and takes half to three quarters of the CPU time."""


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
        from weight_bus.digest.device import Plan
    except ImportError as error:
        log.warning("digests of CUDA tensors take the slow path: Triton is not usable (%s); install triton", error)
        return None
    return Plan


def _plain_digest(part: Part) -> int:
    if part.tensor.device.type == "cpu" and torch.get_num_threads() < TORCH_THREADS:
        stretch = stretch_of(part)
        if stretch is not None:
            return host_digest(stretch)
    return reference_digest(part)
