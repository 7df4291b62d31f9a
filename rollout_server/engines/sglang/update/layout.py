"""Logical tensors in the live tensors of a scheduler: views, by the record of the model's family.

Where each lies is written in slipstream/families/names.py. Replicas (norms, KV heads when there are more ranks than
heads) begin at the same place on several ranks and must be equal there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.families.names import Place, held
from slipstream.families.pictures import decoder_of
from slipstream.families.record import Part
from slipstream.families.sizes import Sizes


@dataclass(frozen=True, slots=True)
class LiveSlice:
    """This rank's part of a logical tensor, a view into the live tensor."""

    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    view: torch.Tensor

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """What tells it from the others of this rank."""
        return self.name, self.start


def live_slices(model: Any, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[LiveSlice]:
    """Slices of each (name, full shape), most often one; none of an expert that another rank has.

    Raises LookupError: no such tensor or family; ValueError: another shape, or not as the family's record says.
    """
    sizes, live = Sizes.of(decoder_of(model.config.to_dict())), dict(model.named_parameters())
    shapes = dict(sizes.tensors())
    parts: dict[str, list[Part]] = {name: [] for name in shapes}
    for part in held(sizes, place_of(model)):
        parts[part.name].append(part)
    for name, shape in tensors:
        if tuple(shape) != shapes[name]:
            raise ValueError(f"{name}: {tuple(shape)} in the update, {shapes[name]} in SGLang's model")
        for part in parts[name]:
            yield _slice(part, live[part.holder].detach())


def place_of(model: Any) -> Place:
    """Which rank of its engine holds this model."""
    divided = next(module for module in model.modules() if hasattr(module, "tp_rank") and hasattr(module, "tp_size"))
    expert_ranks = next((m.moe_ep_size for m in model.modules() if hasattr(m, "moe_ep_size")), 1)
    return Place(divided.tp_rank, divided.tp_size, expert_ranks)


def _slice(part: Part, view: torch.Tensor) -> LiveSlice:
    front = len(part.at) - len(part.size)
    block = (*(1,) * front, *part.size)
    is_inside = len(part.at) == view.dim() and all(
        first + size <= whole for first, size, whole in zip(part.at, block, view.shape, strict=True)
    )
    if not is_inside:
        raise ValueError(f"{part.name}: {part.size} at {part.at} of {part.holder}, which is {tuple(view.shape)}")
    for dim, (first, size) in enumerate(zip(part.at, block, strict=True)):
        view = view.narrow(dim, first, size)
    return LiveSlice(part.name, part.shape, part.start, view[(0,) * front])
