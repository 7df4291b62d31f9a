"""Compare the digest kernel with its reference on the CPU: `TRITON_INTERPRET=1 python interpreted_kernel.py`.

Rounding is compared only on numbers that need none: the interpreter does not round to bfloat16 as the hardware does.
"""

import math
import sys

import torch

from weight_bus.digest.definition import MASK, Part, Task, all_rows, reference_digest
from weight_bus.digest.device import Plan

SHAPES = [(1,), (2047,), (2049,), (3, 5), (7, 1000), (40, 1024), (2, 3, 4), (33_000,), (3, 40_000)]
DTYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64)


def parts() -> list[Part]:
    """Whole tensors, rows, columns, transposed ones."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in DTYPES:
        for shape in SHAPES:
            size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
            tensor = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)
            found.append(Part(tensor))
            if len(shape) > 1:
                start = (1, *(0,) * (len(shape) - 1))
                found.append(Part(tensor[1:], shape, start))
                found.append(Part(tensor[..., 1:], shape, (0,) * (len(shape) - 1) + (1,)))
                found.append(Part(tensor.transpose(0, -1)))
            if len(shape) > 2:
                found.append(Part(tensor[1:, 1:, 1:], shape, (1,) * len(shape)))
    exact = torch.randn(5000, generator=generator).to(torch.float16).float()
    return [*found, Part(exact, rounded=torch.float16), Part(exact.to(torch.bfloat16).float(), rounded=torch.bfloat16)]


def main() -> int:
    wrong = 0
    everything = parts()
    tasks = [Task(rows, slot, part.rounded) for slot, part in enumerate(everything, 1) for rows in all_rows(part)]
    tasks.append(tasks[0]._replace(slot=len(everything) + 1))
    tasks.append(tasks[1]._replace(slot=len(everything) + 1))  # two tasks, one slot
    plan = Plan(tasks, len(everything) + 3, torch.device("cpu"))
    sums = plan.launch().tolist()
    assert plan.launch().tolist() == sums, "again"
    assert sums[0] == sums[-1] == 0, "nothing is added elsewhere"
    assert sums[-2] & MASK == (sums[1] + sums[2]) & MASK
    for part, found in zip(everything, sums[1:-2], strict=True):
        if found & MASK != reference_digest(part):
            wrong += 1
            print("differs:", part.tensor.dtype, tuple(part.tensor.shape), part.full_shape, part.start, part.rounded)
    print("compared" if not wrong else "FAILED:", len(everything))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
