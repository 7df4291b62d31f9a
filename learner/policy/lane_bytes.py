"""What the fullest learner rank packs of a version where each sends lanes (weight_bus/lanes.py). No torch."""

import math

from slipstream.families.names import Place, held
from slipstream.families.sizes import Sizes

ALIGNMENT = 64
"""Of tensors in their buckets (weight_bus.manifest)."""


def lane_bytes(sizes: Sizes, senders: int, positions: int, element_bytes: int) -> int:
    """Of a version, what the fullest of so many learner ranks sends (weight_bus.lanes.plan_lanes)."""
    tensors = dict[str, int]()
    for part in held(sizes, Place(0, positions)):  # the fullest
        size = element_bytes * math.prod(part.size)
        tensors[part.name] = tensors.get(part.name, 0) + -(-size // ALIGNMENT) * ALIGNMENT
    lanes = [0] * max(1, senders // positions)  # of the position that has the fewest
    for size in sorted(tensors.values(), reverse=True):
        lanes[lanes.index(min(lanes))] += size
    return max(lanes) * -(-positions // senders)
