"""The digest as a Triton kernel, for tensors on a CUDA device: one launch for all of a kind.

Imported only where such a tensor is digested, so that nothing else needs Triton. Each element is read once. Rows are
`row_step` flat indices apart in the logical tensor and `stride` elements apart in memory. All tasks of one kind
(element, rounding, alignment) go into one table: hundreds of tensors would otherwise cost hundreds of launches.

The arithmetic is that of `mix` in definition.py in unsigned 32 bits, where every sum and product is modulo 2^32
by itself and a right shift fills with zeros. (index + 1) * INDEX_KEY is not multiplied out for each element: it grows
by BLOCK * INDEX_KEY from one block to the next.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from weight_bus.digest.definition import BITS_KEY, HIGH_KEY, INDEX_KEY, MIX_1, MIX_2, DigestTask

BLOCK, BLOCKS = tl.constexpr(1024), tl.constexpr(64)  # elements at once, and how often a program does so
WARPS = 4
ALIGN = 16  # bytes of a vector load; what begins elsewhere is read element by element
BITS, HIGH, INDEX = tl.constexpr(BITS_KEY), tl.constexpr(HIGH_KEY), tl.constexpr(INDEX_KEY)
FIRST, SECOND = tl.constexpr(MIX_1), tl.constexpr(MIX_2)
STEP = tl.constexpr(BLOCK.value * INDEX_KEY & 0xFFFFFFFF)
"""What the index's term of a lane grows by from one block to the next."""
ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ELEMENTS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


class LaunchKind(NamedTuple):
    """Tasks of one kind share a launch."""

    width: int
    rounded: torch.dtype | None
    aligned: bool


@triton.jit  # type: ignore[untyped-decorator]
def _mixed(values, keyed, ROUND: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """mix(bits, index) of each lane; `keyed` is (index + 1) * INDEX_KEY in uint32. int64 out, the sign carried."""
    if ROUND is not None:
        values = values.to(ROUND, fp_downcast_rounding="rtne").to(tl.int16, bitcast=True)
    if WIDE:
        low = values.to(tl.int32).to(tl.uint32, bitcast=True)
        bits = low + (values >> 32).to(tl.int32).to(tl.uint32, bitcast=True) * HIGH
    else:
        bits = values.to(tl.int32).to(tl.uint32, bitcast=True)  # the sign is carried; uint8 has none
    h = bits * BITS + keyed
    h = (h ^ (h >> 16)) * FIRST
    h = (h ^ (h >> 15)) * SECOND
    h = h ^ (h >> 16)
    return h.to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _digest_tasks(  # type: ignore[no-untyped-def]
    table,
    owners,
    sums,
    ELEMENT: tl.constexpr,
    ROUND: tl.constexpr,
    WIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Each program adds up BLOCKS blocks of a row of its task, and adds the sum to the task's slot."""
    program = tl.program_id(0)
    task = table + tl.load(owners + program).to(tl.int64) * 8
    address, cols, stride = tl.load(task), tl.load(task + 1), tl.load(task + 2)
    chunks, base, row_step = tl.load(task + 3), tl.load(task + 4), tl.load(task + 5)
    slot, first_program = tl.load(task + 6), tl.load(task + 7)
    local = program - first_program
    row = local // chunks
    begin = (local % chunks) * (BLOCK * BLOCKS)
    left = tl.minimum(cols - begin, BLOCK * BLOCKS).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    source = address.to(tl.pointer_type(ELEMENT)) + (row * stride + begin)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
    first = (base + row * row_step + begin + 1).to(tl.int32).to(tl.uint32, bitcast=True)
    keyed = (first + lane.to(tl.uint32)) * INDEX
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for _ in range(left // BLOCK):
        total += _mixed(tl.load(source + lane), keyed, ROUND, WIDE)
        source += BLOCK
        keyed += STEP
    rest = left % BLOCK
    if rest > 0:
        inside = lane < rest
        values = tl.load(source + lane, mask=inside, other=0)
        total += tl.where(inside, _mixed(values, keyed, ROUND, WIDE), 0)
    tl.atomic_add(sums + slot, tl.sum(total, axis=0), sem="relaxed")


class DigestPlan:
    """The same tasks again and again, into so many sums. Their table is made once, and kept on the device.

    All is on one CUDA device (in Triton's interpreter, the CPU), the columns contiguous.
    """

    def __init__(self, tasks: Sequence[DigestTask], slots: int, device: torch.device) -> None:
        self._slots, self._device = slots, device
        self._tasks = tasks  # their memory must live as long as the table that names it
        tables: dict[LaunchKind, list[list[int]]] = defaultdict(list)
        programs: dict[LaunchKind, list[int]] = defaultdict(list)  # of each task
        for task in tasks:
            values, base, row_step = task.rows
            (num_rows, cols), width, stride = values.shape, values.element_size(), values.stride(0)
            aligned = values.data_ptr() % ALIGN == 0 and (num_rows == 1 or stride * width % ALIGN == 0)
            kind, chunks = LaunchKind(width, task.rounded, aligned), -(-cols // (BLOCK.value * BLOCKS.value))
            first = tables[kind][-1][-1] + programs[kind][-1] if tables[kind] else 0
            tables[kind].append([values.data_ptr(), cols, stride, chunks, base, row_step, task.slot, first])
            programs[kind].append(num_rows * chunks)
        self._launches: list[tuple[LaunchKind, torch.Tensor, torch.Tensor]] = []
        """With the table, int64[tasks, 8], and the task of each program, int32[programs]."""
        for kind, table in tables.items():
            numbers = torch.arange(len(table), dtype=torch.int32)
            owners = torch.repeat_interleave(numbers, torch.tensor(programs[kind])).to(device)
            self._launches.append((kind, torch.tensor(table, dtype=torch.int64).to(device), owners))

    def launch(self) -> torch.Tensor:
        """The sums of all tasks by slot, int64[slots] on the device, modulo 2^64, without waiting for them.

        The tasks' memory must stay unchanged until they are read.
        """
        sums = torch.zeros(self._slots, dtype=torch.int64, device=self._device)
        # the device of a tensor here, for Triton launches on the current one
        with torch.cuda.device_of(sums):  # type: ignore[no-untyped-call]
            for kind, table, owners in self._launches:
                _digest_tasks[(owners.numel(),)](
                    table,
                    owners,
                    sums,
                    ELEMENT=ELEMENTS[kind.width] if kind.rounded is None else tl.float32,
                    ROUND=None if kind.rounded is None else ROUNDED[kind.rounded],
                    WIDE=kind.width == 8,
                    ALIGNED=kind.aligned,
                    num_warps=WARPS,
                )
        return sums
