"""Live weights of a scheduler: where an update is copied, and the digests.

What the next forward reads is known tensor by tensor (layout.py). So after the first update, which the model loads by
its own code, the others are copies into these views, all in one go, where nothing else is made of a weight: on a GPU,
every parameter is covered, the dtypes are those of the update, and the model has no step after loading. That takes
milliseconds less of Python than the model's loader, with the engine standing still.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from rollout_server.engines.sglang.update.layout import LiveSlice, live_slices
from weight_bus.digest import Digester, Part

Shapes = Iterable[tuple[str, tuple[int, ...]]]
LARGE = 4 * 1024 * 1024
"""Bytes from which on a copy takes longer than its launch."""
GROUPS = 4
Staged = Sequence[tuple[str, torch.Tensor]]


class Group(NamedTuple):
    """Slices that are copied, and then digested, together."""

    slices: list[LiveSlice]
    digester: Digester


class LiveWeights:
    """The parts of the tensors of these names that a model holds on this rank.

    Raises:
        KeyError: the model has no such tensor.
        ValueError: a live tensor does not have the shape that the map expects.
    """

    def __init__(self, model: Any, shapes: Shapes) -> None:
        self._model = model
        self._shapes = list(shapes)
        self.slices = list(live_slices(model, self._shapes))
        self._groups = [
            Group(some, Digester(Part(piece.view, piece.full_shape, piece.start) for piece in some))
            for some in _grouped(self.slices)
        ]
        self._loaded = False
        """By the model's own code, once."""
        self._copies: tuple[Staged, list[list[torch.Tensor]]] | None = None
        """An update, and the parts of it that belong here, by group."""
        self._side: torch.cuda.Stream | None = None

    def are_of(self, model: Any, shapes: Shapes) -> bool:
        """Whether these are the slices of this model and these tensors."""
        return model is self._model and list(shapes) == self._shapes

    def takes_copies(self, staged: Staged) -> bool:
        """Whether copies are all that loading this update is.

        Args:
            staged: name and whole tensor, all of them, on the device of the model. The same object means the same
                memory as the last time.
        """
        if self._copies is None or self._copies[0] is not staged:
            self._copies = (staged, self._parts(staged))
        return self._loaded and bool(self._copies[1])

    def load(self, staged: Staged) -> None:
        """Have the model load an update."""
        with torch.no_grad():
            self._model.load_weights(staged)
        self._loaded = True

    def copy(self, staged: Staged) -> tuple[list[int], float]:
        """Copy an update and digest the live tensors; groups are copied and digested in a pipeline.

        Returns:
            The digest of each slice, and the seconds until the last copy had ended.
        """
        assert self.takes_copies(staged) and self._copies is not None
        self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        launched = []
        with torch.no_grad():
            for group, parts in zip(self._groups, self._copies[1], strict=True):
                _copy([piece.view for piece in group.slices], parts)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
                with torch.cuda.stream(self._side):
                    self._side.wait_event(copied)
                    launched.append(group.digester.launch())
        end.record()
        torch.cuda.current_stream().wait_stream(self._side)
        digests = [value for some in launched for value in some.sums()]
        return digests, begin.elapsed_time(end) / 1e3

    def digests(self) -> list[int]:
        """The digest of each slice as it is live now."""
        launched = [group.digester.launch() for group in self._groups]
        return [value for some in launched for value in some.sums()]

    def _parts(self, staged: Staged) -> list[list[torch.Tensor]]:
        """Source of each slice, by group; empty if copies alone do not make a load."""
        whole = dict(staged)
        parts = [[_cut(whole[piece.name], piece) for piece in group.slices] for group in self._groups]
        alike = all(
            part.is_cuda and part.dtype == piece.view.dtype
            for group, some in zip(self._groups, parts, strict=True)
            for piece, part in zip(group.slices, some, strict=True)
        )
        by_copies = alike and not hasattr(self._model, "post_load_weights") and _covered(self._model, self.slices)
        return parts if by_copies else []


def _grouped(slices: Sequence[LiveSlice]) -> list[list[LiveSlice]]:
    """Consecutive groups, of about the same number of bytes."""
    most = sum(piece.view.nbytes for piece in slices) / GROUPS
    groups: list[list[LiveSlice]] = [[]]
    size = 0
    for piece in slices:
        if size >= most:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.view.nbytes
    return groups


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Large ones by the copy engine's call, one by one; small ones in few launches."""
    small: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for target, source in zip(targets, sources, strict=True):
        if source.nbytes >= LARGE:
            target.copy_(source, non_blocking=True)
        else:
            small[0].append(target)
            small[1].append(source)
    if small[0]:
        torch._foreach_copy_(*small)


def _cut(whole: torch.Tensor, piece: LiveSlice) -> torch.Tensor:
    for dim, (first, size) in enumerate(zip(piece.start, piece.view.shape, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole


def _covered(model: Any, slices: Iterable[LiveSlice]) -> bool:
    """Whether the slices cover every parameter except padded vocabulary rows."""
    padded = {
        parameter.data_ptr()
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
        if getattr(module, "shard_indices", None) is not None
    }
    left = {parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}
    begins = sorted(left)
    for piece in slices:
        left[begins[bisect_right(begins, piece.view.data_ptr()) - 1]] -= piece.view.numel()
    sizes = {parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}
    return all(rest == 0 or (begin in padded and 0 < rest < sizes[begin]) for begin, rest in left.items())
