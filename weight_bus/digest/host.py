"""The digest of contiguous elements in host memory, in NumPy: a logical shift is one operation there, and every
intermediate result has its place in the cache."""

import functools
import threading
from typing import Any

import numpy as np
import torch

from weight_bus.digest.definition import BITS_KEY, HIGH_KEY, INDEX_KEY, MASK, MIX_1, MIX_2, VIEWS, Rows

HOST_CHUNK = 1 << 16
"""Elements at once, as CHUNK of the definition."""


class _Scratch(threading.local):
    """What a thread computes in, in NumPy."""

    def __init__(self) -> None:
        self.mixed, self.shifted = np.empty(HOST_CHUNK, np.uint32), np.empty(HOST_CHUNK, np.uint32)


_scratch = _Scratch()


@functools.cache
def _host_lanes() -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The index's term of the first HOST_CHUNK elements, less its constant."""
    return np.arange(HOST_CHUNK, dtype=np.uint32) * np.uint32(INDEX_KEY)


def host_digest(rows: Rows, rounded: torch.dtype) -> int:
    """`rows_digest` of a single row, in unsigned 32 bits."""
    (values,), first, _ = rows
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
