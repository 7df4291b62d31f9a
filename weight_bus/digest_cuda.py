"""The digest of weight_bus.digest as one Triton kernel, for tensors on a CUDA device.

Imported only where such a tensor is digested, so that nobody else needs Triton. Each element is read once:
the kernel walks rows of contiguous elements, `row_step` flat indices apart in the logical tensor and `stride`
elements apart in memory, which covers whole tensors (one long row), shards of rows and slices of columns.

The arithmetic is that of `weight_bus.digest._mixed_sum`, in unsigned 64 bits, where every sum and product is
modulo 2^64 by itself and a right shift fills with zeros. (index + 1) * INDEX_KEY is not multiplied out for each
element: it grows by BLOCK * INDEX_KEY from one block to the next. What is left is some thirty integer operations
an element, so a 2-byte tensor is bound by them rather than by memory.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weight_bus.digest import BITS_KEY, INDEX_KEY, MASK, MIX_1, MIX_2, VIEWS, Rows

BLOCK = 2048
BLOCKS_PER_PROGRAM = 16
WARPS = 8
STEP = BLOCK * INDEX_KEY & MASK
"""What the index's term of a lane grows by from one block to the next."""
ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Keys(NamedTuple):
    """The constants of the mix, as compile-time arguments of the kernel."""

    BITS_KEY: int = BITS_KEY
    INDEX_KEY: int = INDEX_KEY
    STEP: int = STEP
    MIX_1: int = MIX_1
    MIX_2: int = MIX_2


@triton.jit  # type: ignore[untyped-decorator]
def _mixed(  # type: ignore[no-untyped-def]
    values, keyed, ROUND: tl.constexpr, BITS_KEY: tl.constexpr, MIX_1: tl.constexpr, MIX_2: tl.constexpr
):
    """mix(bits, index) of each lane; `keyed` is (index + 1) * INDEX_KEY. uint64 in and out."""
    if ROUND is not None:
        values = values.to(ROUND, fp_downcast_rounding="rtne").to(tl.int16, bitcast=True)
    bits = values.to(tl.int64).to(tl.uint64, bitcast=True)  # the sign is carried into the upper bits; uint8 has none
    h = bits * BITS_KEY + keyed
    h = (h ^ (h >> 30)) * MIX_1
    h = (h ^ (h >> 27)) * MIX_2
    return h ^ (h >> 31)


@triton.jit(do_not_specialize=("slot", "cols", "chunks", "base", "row_step"))  # type: ignore[untyped-decorator]
def _digest_rows(  # type: ignore[no-untyped-def]
    data,
    sums,
    slot,
    cols,
    stride,
    chunks,
    base,
    row_step,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BITS_KEY: tl.constexpr,
    INDEX_KEY: tl.constexpr,
    STEP: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
):
    """Program `row * chunks + chunk` adds up BLOCKS blocks of a row, and adds the sum to `sums[slot]`."""
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    begin = (program % chunks).to(tl.int64) * (BLOCK * BLOCKS)
    left = tl.minimum(cols - begin, BLOCK * BLOCKS).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    source = data + row * stride + begin
    first = (base + row * row_step + begin + 1).to(tl.uint64, bitcast=True)
    keyed = (first + lane.to(tl.uint64)) * INDEX_KEY
    total = tl.zeros([BLOCK], dtype=tl.uint64)
    for _ in range(left // BLOCK):
        total += _mixed(tl.load(source + lane), keyed, ROUND, BITS_KEY, MIX_1, MIX_2)
        source += BLOCK
        keyed += STEP
    rest = left % BLOCK
    if rest > 0:
        inside = lane < rest
        mixed = _mixed(tl.load(source + lane, mask=inside, other=0), keyed, ROUND, BITS_KEY, MIX_1, MIX_2)
        total += tl.where(inside, mixed, 0)
    tl.atomic_add(sums + slot, tl.sum(total, axis=0).to(tl.int64, bitcast=True), sem="relaxed")


def add_digest(rows: Rows, sums: torch.Tensor, slot: int, rounded: torch.dtype | None) -> None:
    """Add the digest of `rows` to `sums[slot]`, without waiting for it.

    Args:
        rows: not empty; the columns contiguous.
        sums: int64, on the device of the rows, modulo 2^64.
        rounded: digest float32 elements as if they had been rounded to this dtype (bfloat16, float16); none digests
            the bits as they are.
    """
    values = rows.values
    num_rows, cols = values.shape
    stride = values.stride(0)
    data = values if rounded is not None else values.view(VIEWS[values.element_size()])
    if num_rows > 1 and stride == cols == rows.row_step:
        num_rows, cols = 1, num_rows * cols
    if num_rows == 1:
        stride = 0  # unused; a constant spares compiled variants
    chunks = -(-cols // (BLOCK * BLOCKS_PER_PROGRAM))
    arguments: dict[str, Any] = Keys()._asdict()
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        _digest_rows[(num_rows * chunks,)](
            data,
            sums,
            slot,
            cols,
            stride,
            chunks,
            rows.base,
            rows.row_step,
            ROUND=None if rounded is None else ROUNDED[rounded],
            BLOCK=BLOCK,
            BLOCKS=BLOCKS_PER_PROGRAM,
            num_warps=WARPS,
            **arguments,
        )
