"""The layout of a model: per logical tensor, which rank holds which box of it.

Each rank reads its boxes from its DTensors and tells them to the others once, so parameters may lie on different
meshes, be cut unevenly, or not be everywhere. Ranks are those of the default process group.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from learner.layout.boxes import Box, Inner, Inside, as_it_is, box_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Holding(NamedTuple):
    """A box of a tensor, and where it is."""

    box: Box
    ranks: tuple[int, ...]
    """All that hold these elements, ascending."""
    sender: int
    """The one of them that stands for all: it counts in sums and has something to send."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One logical tensor by its HF name: the box held here (float32, unless frozen), perhaps nothing."""

    name: str
    shape: tuple[int, ...]
    local: torch.Tensor
    """In the memory of the parameter, and in the shape of the box."""
    start: tuple[int, ...]
    """Of the box in the tensor."""
    copies: int = 1
    """Ranks that hold each element."""
    counts: bool = True
    """Whether this is the one copy that stands for all."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def box(self) -> Box:
        return Box(self.start, tuple(self.local.shape))


class _Parameter(NamedTuple):
    """Of all ranks together."""

    inner: tuple[Inner, ...]
    holdings: tuple[Holding, ...]
    mine: Box
    """Held by this rank; perhaps nothing."""


class Layout:
    """Which rank holds what of a model; the same on all ranks, but for what is said to be here."""

    def __init__(self, held: Mapping[int, Iterable[tuple[str, Sequence[int], Box]]], rank: int, inside: Inside) -> None:
        """`held` are parameters of each rank: name, shape of the whole, box.

        Raises ValueError: the boxes of a parameter, or the tensors inside of it, do not make it up.
        """
        self._rank = rank
        shapes: dict[str, tuple[int, ...]] = {}
        boxes: dict[str, dict[Box, list[int]]] = {}
        for number, parameters in sorted(held.items()):
            for name, shape, box in parameters:
                shapes.setdefault(name, tuple(shape))
                if box.numel:
                    boxes.setdefault(name, {}).setdefault(box, []).append(number)
        self._parameters: dict[str, _Parameter] = {}
        self._tensors: dict[str, tuple[str, Inner]] = {}
        """Of which parameter, and where in it."""
        self._holdings: dict[str, list[Holding]] = {}
        """Of tensors that were asked for: with thousands of experts and many ranks they take a second."""
        sent: Counter[int] = Counter()
        for name, shape in shapes.items():
            inner, holdings = tuple(inside(name, shape)), []
            for box, ranks in sorted(boxes.get(name, {}).items()):
                sender = min(ranks, key=lambda one: (sent[one], one))
                sent[sender] += box.numel
                holdings.append(Holding(box, tuple(ranks), sender))
            _check(name, shape, inner, holdings)
            mine = next((box for box, ranks, _ in holdings if rank in ranks), Box((0,) * len(shape), (0, *shape[1:])))
            self._parameters[name] = _Parameter(inner, tuple(holdings), mine)
            self._tensors |= {one.name: (name, one) for one in inner}

    @classmethod
    def gathered(
        cls, parameters: Iterable[tuple[str, torch.Tensor]], group: dist.ProcessGroup, inside: Inside = as_it_is
    ) -> "Layout":
        """Of the parameters of these ranks, by name. A collective."""
        named = list(parameters)
        told = exchanged([[name, list(p.shape), *box_of(p)] for name, p in named], group, carrier(named[0][1], group))
        held = {
            rank: [(name, shape, Box(tuple(start), tuple(size))) for name, shape, start, size in one]
            for rank, one in told.items()
        }
        return cls(held, dist.get_rank(), inside)

    @property
    def names(self) -> list[str]:
        """Of all logical tensors, in the order used everywhere."""
        return list(self._tensors)

    def holdings(self, name: str) -> list[Holding]:
        """The boxes of a logical tensor, disjoint and together all of it."""
        if (known := self._holdings.get(name)) is not None:
            return known
        parameter, inner = self._tensors[name]
        near = (one for one in self._parameters[parameter].holdings if inner.box.meets(one.box))
        found = self._holdings[name] = sorted(one._replace(box=inner.held(one.box)) for one in near)
        return found

    def givers(self, name: str, places: Mapping[int, int]) -> list[tuple[Box, list[int]]]:
        """The boxes of a logical tensor, each with who holds it of a group, the sender first.

        Args:
            name: of the tensor.
            places: of the group's ranks in it.

        Raises:
            ValueError: ranks outside of the group hold what none of it has.
        """
        found = []
        for box, ranks, sender in self.holdings(name):
            here = [places[rank] for rank in dict.fromkeys((sender, *ranks)) if rank in places]
            if not here:
                raise ValueError(f"{name}: its {box} lies on ranks {ranks}, none of which takes part")
            found.append((box, here))
        return found

    def ranks_beside(self, parameter: str) -> tuple[int, ...]:
        """Ranks that hold the same of a parameter as this one; none where this one holds nothing."""
        return next((ranks for _, ranks, _ in self._parameters[parameter].holdings if self._rank in ranks), ())

    def shards(self, local: Mapping[str, torch.Tensor]) -> list[Shard]:
        """Logical tensors, from what this rank has by the name of the parameter: weights, moments or copies of them."""
        return [
            Shard(one.name, one.shape, one.view(tensor, mine), one.held(mine).start, len(holdings[0].ranks), counts)
            for name, tensor in local.items()
            for (inner, holdings, mine), counts in [(self._parameters[name], self._counts(name))]
            for one in inner
        ]

    def _counts(self, parameter: str) -> bool:
        return any(sender == self._rank for _, _, sender in self._parameters[parameter].holdings)

    def squared_norm(self, local: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This rank's term of the squared norm of what lies as the parameters do, 0-dim float64.

        Over ranks the terms add up to it.
        """
        counted = [tensor for name, tensor in local.items() if self._counts(name)]
        if not counted:
            return torch.zeros((), dtype=torch.float64, device=next(iter(local.values())).device)
        return torch.nn.utils.get_total_norm(counted).double().square()


def _check(name: str, shape: tuple[int, ...], inner: Sequence[Inner], holdings: Sequence[Holding]) -> None:
    size = math.prod(shape)
    if size != (found := sum(one.box.numel for one in inner)):
        raise ValueError(f"{name}: the tensors inside of it have {found} of its {size} elements")
    if size != (found := sum(holding.box.numel for holding in holdings)):
        raise ValueError(f"{name}: ranks hold {found} of its {size} elements")
    if len(copies := {len(holding.ranks) for holding in holdings}) > 1:
        raise ValueError(f"{name}: some of it lies on {min(copies)} ranks, some on {max(copies)}")


def carrier(held: torch.Tensor, group: dist.ProcessGroup) -> torch.device:
    """Where a collective takes numbers from: gloo host memory, NCCL none of it, where moments may lie."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return held.device if held.is_cuda else torch.device("cuda")


def exchanged(mine: Any, group: dist.ProcessGroup, device: torch.device) -> dict[int, Any]:
    """Plain data of each rank of a group, by rank of the default one. A collective."""
    ranks = dist.get_process_group_ranks(group)
    data = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group=group)
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    found = [torch.empty_like(padded) for _ in ranks]
    dist.all_gather(found, padded, group=group)
    texts = (bytes(each[: int(size)].tolist()) for each, size in zip(found, sizes, strict=True))
    return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}
