"""Host memory for copies of tensors, pinned beside a GPU, in few blocks.

torch's allocator of pinned memory rounds every request up to a power of two, so that a request for each tensor takes up
to twice its bytes. Blocks have such sizes from the start, and tensors lie in them one after the other.
"""

from collections.abc import Sequence

import torch

BLOCK_BYTES = 2 * 1024**3
"""Of a block, unless a tensor is larger or what is left is less."""
ALIGNMENT = 64


def host_tensors(like: Sequence[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
    """A tensor in host memory of each one's shape and dtype, without values."""
    sizes = [-(-one.nbytes // ALIGNMENT) * ALIGNMENT for one in like]
    left, found, blocks = sum(sizes), dict[int, torch.Tensor](), list[torch.Tensor]()
    for number in sorted(range(len(like)), key=lambda number: -sizes[number]):
        size, one = sizes[number], like[number]
        place = next((place for place, block in enumerate(blocks) if block.nbytes >= size), len(blocks))
        if place == len(blocks):
            whole = max(1 << (size - 1).bit_length(), 1 << min(left, BLOCK_BYTES).bit_length() - 1) if size else 1
            blocks.append(torch.empty(whole, dtype=torch.uint8, pin_memory=pinned))
        found[number] = blocks[place][: one.nbytes].view(one.dtype).view(one.shape)
        blocks[place] = blocks[place][size:]
        left -= size
    return [found[number] for number in range(len(like))]
