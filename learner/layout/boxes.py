"""Boxes of tensors: what a rank holds of a parameter, and where in a parameter a logical tensor is.

A parameter is what the transformers model holds; a logical tensor is one of the checkpoint. Most are the same. A fused
parameter has several inside:

    experts.gate_up_proj [E, 2 I, H]     experts.3.gate_proj.weight [I, H] = box (3, 0, 0), (1, I, H)
                                         experts.3.up_proj.weight   [I, H] = box (3, I, 0), (1, I, H)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from slipstream.families.record import Part


class Box(NamedTuple):
    """Part of a tensor: in each dimension the first index and how many."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes the tensor."""
        return tuple(slice(first, first + size) for first, size in zip(self.start, self.shape, strict=True))

    def common(self, other: "Box") -> "Box":
        """What both contain; perhaps nothing."""
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        return Box(start, tuple(max(0, end - first) for first, end in zip(start, ends, strict=True)))

    def meets(self, other: "Box") -> bool:
        """Whether they have something in common; far cheaper than to say what."""
        for first, size, begin, many in zip(*self, *other, strict=True):
            if first >= begin + many or begin >= first + size:
                return False
        return True

    def seen_from(self, origin: Sequence[int]) -> "Box":
        """The same where `origin` is the first index."""
        return Box(tuple(first - zero for first, zero in zip(self.start, origin, strict=True)), self.shape)


class Inner(NamedTuple):
    """A logical tensor inside of a parameter."""

    name: str
    box: Box
    """Of the parameter; it has as many more dimensions, of size 1, in front of those of the logical tensor."""
    dims: int
    """Of the logical tensor."""
    transposed: bool = False
    """The last two dimensions are the other way round in the parameter."""

    @classmethod
    def of(cls, part: Part) -> "Inner":
        """As the record of a family says it."""
        ahead = (1,) * (len(part.at) - len(part.size))
        return cls(part.name, Box(part.at, (*ahead, *part.size)), len(part.size))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logical tensor."""
        return self._turned(self.box.shape)

    def held(self, box: Box) -> Box:
        """The part of the logical tensor that this box of the parameter contains."""
        here = self.box.common(box)
        if not here.numel:
            return Box((0,) * self.dims, (0, *self.shape[1:]))
        here = here.seen_from(self.box.start)
        return Box(self._turned(here.start), self._turned(here.shape))

    def view(self, local: torch.Tensor, box: Box) -> torch.Tensor:
        """That part in the memory of `local`, which is the box of the parameter."""
        here = self.box.common(box)
        if not here.numel:
            return local.new_empty((0, *self.shape[1:]))
        if here == box and len(box.shape) == self.dims and not self.transposed:
            return local
        part = local[here.seen_from(box.start).slices]
        part = part.reshape(part.shape[part.dim() - self.dims :])  # a view: what goes is of size 1
        return part.mT if self.transposed else part

    def _turned(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        own = sizes[len(sizes) - self.dims :]
        return (*own[:-2], own[-1], own[-2]) if self.transposed else own


Inside = Callable[[str, tuple[int, ...]], Iterable[Inner]]
"""The logical tensors in a parameter, by its name and shape: what a family says of it."""


def as_it_is(name: str, shape: tuple[int, ...]) -> list[Inner]:
    """Of a parameter that is a tensor of the checkpoint."""
    return [Inner(name, Box.whole(shape), len(shape))]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that this rank holds, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box_of(parameter: torch.Tensor) -> Box:
    """What this rank holds of a parameter, by placements and mesh.

    Each mesh dimension cuts as torch.chunk does: ceil(size / ranks) each, the last fewer or none. They cut from left to
    right, but for FSDP's, which cuts what ranks to the right of it have divided before (_StridedShard).

    Raises ValueError: a placement is of another kind, or the memory has another shape.
    """
    box = Box.whole(parameter.shape)
    if not isinstance(parameter, DTensor):
        return box
    start, shape, place = list(box.start), list(box.shape), parameter.device_mesh.get_coordinate()
    assert place is not None, "a rank holds no parameter of a mesh that it is not in"
    cuts = [(dim, placement) for dim, placement in enumerate(parameter.placements) if placement != Replicate()]
    strided = [cut for cut in cuts if hasattr(cut[1], "split_factor")]
    for mesh_dim, placement in [*(cut for cut in cuts if cut not in strided), *reversed(strided)]:
        if (dim := getattr(placement, "dim", None)) is None:
            raise ValueError(f"a parameter of {box.shape} has a placement {placement}, expected shards and copies")
        size = -(-shape[dim] // parameter.device_mesh.size(mesh_dim))
        first = min(place[mesh_dim] * size, shape[dim])
        start[dim], shape[dim] = start[dim] + first, min(size, shape[dim] - first)
    found = Box(tuple(start), tuple(shape))
    if (there := tuple(local_of(parameter).shape)) != found.shape:
        raise ValueError(f"{there} of a parameter of {box.shape} are here, expected {found.shape}")
    return found
