"""The live weights of a scheduler: what an update copies where, and their digests, worked out once.

What the next forward reads is known tensor by tensor (layout.py). So after the first update, which the model loads by
its own code, the others are copies into these views, all in one go, where nothing else is made of a weight: on a GPU,
every parameter is covered, the dtypes are those of the update, and the model has no step after loading. That takes
milliseconds less of Python than the model's loader, with the engine standing still.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from rollout_server.engines.sglang.layout import LiveSlice, live_slices
from weight_bus.digest import Digester, Launched, Part

Shapes = Iterable[tuple[str, tuple[int, ...]]]
LARGE = 4 * 1024 * 1024
"""Bytes from which on a copy takes longer than its launch."""
Staged = Sequence[tuple[str, torch.Tensor]]


class LiveWeights:
    """The parts of the tensors of these names that a model holds on this rank.

    Raises:
        KeyError: the model has no such tensor.
        ValueError: a live tensor does not have the shape that the map expects.
    """

    def __init__(self, model: Any, shapes: Shapes) -> None:
        self._model = model
        self._shapes = list(shapes)
        self._memory = _memory(model)
        self.slices = list(live_slices(model, self._shapes))
        self._digester = Digester(Part(piece.view, piece.full_shape, piece.start) for piece in self.slices)
        self._loaded = False
        """By the model's own code, once."""
        self._copies: tuple[Staged, list[torch.Tensor], list[torch.Tensor]] | None = None
        """An update, the parts of it that belong here, and where."""

    def are_of(self, model: Any, shapes: Shapes) -> bool:
        """Whether this is still what the next forward reads: parameters may have moved."""
        return model is self._model and list(shapes) == self._shapes and _memory(model) == self._memory

    def load(self, staged: Staged) -> None:
        """Write an update into the live weights; on a GPU it is only launched.

        Args:
            staged: name and whole tensor, all of them, on the device of the model. The same object means the same
                memory as the last time.
        """
        if self._copies is None or self._copies[0] is not staged:
            self._copies = (staged, *self._pairs(staged))
        _, targets, sources = self._copies
        with torch.no_grad():
            if self._loaded and targets:
                _copy(targets, sources)
            else:
                self._model.load_weights(staged)
                self._loaded = True

    def launch(self) -> Launched:
        """Begin to digest what is live, by slice."""
        return self._digester.launch()

    def _pairs(self, staged: Staged) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Live tensors and what belongs into them; nothing where copies would not be all that a load does."""
        whole = dict(staged)
        sources = [_cut(whole[piece.name], piece) for piece in self.slices]
        alike = all(
            source.is_cuda and source.dtype == piece.view.dtype
            for source, piece in zip(sources, self.slices, strict=True)
        )
        if not alike or hasattr(self._model, "post_load_weights") or not _covered(self._model, self.slices):
            return [], []
        return [piece.view for piece in self.slices], sources


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


def _memory(model: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def _cut(whole: torch.Tensor, piece: LiveSlice) -> torch.Tensor:
    for dim, (first, size) in enumerate(zip(piece.start, piece.view.shape, strict=True)):
        whole = whole.narrow(dim, first, size)
    return whole


def _covered(model: Any, slices: Iterable[LiveSlice]) -> bool:
    """Whether every parameter lies in the slices, but for the padded rows of a vocabulary, which are in none."""
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
