"""Live weights of a scheduler: where an update is copied, and the digests.

What the next forward reads is known tensor by tensor (layout.py). So after the first update, which the model loads by
its own code, the others are copies into these views, all in one go, where nothing else is made of a weight: on a GPU,
every parameter is covered, the dtypes are those of the update, and the model has no step after loading. That takes
milliseconds less of Python than the model's loader, with the engine standing still.
"""

import itertools
import time
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rollout_server.engines.sglang.update.layout import LiveSlice, live_slices
from weight_bus.digest import Digester, Launched, TensorSlice

Shapes = Iterable[tuple[str, tuple[int, ...]]]
Digested = list[tuple[str, tuple[int, ...], int, int]]
"""(name, where the slice begins, elements, digest) of what a scheduler holds."""
LARGE = 4 * 1024 * 1024
"""Bytes from which on a copy takes longer than its launch."""
GROUPS = 4
"""Of slices that are copied, and then digested, together."""
Staged = Sequence[tuple[str, torch.Tensor]]

_addresses: tuple[Any, dict[str, int]] = (None, {})
"""A model, and where its parameters lay when captured graphs were made to read them."""


class RankWeights:
    """What a model holds of these tensors on this rank. Raises as `live_slices`."""

    def __init__(self, model: Any, shapes: Shapes) -> None:
        self._model = model
        self._shapes = list(shapes)
        self.slices = list(live_slices(model, self._shapes))
        self._groups = _grouped(self.slices)
        self._digesters = [
            Digester(TensorSlice(p.view, p.full_shape, p.start) for p in group) for group in self._groups
        ]
        self._loaded = False
        """By the model's own code, once."""
        self._copies: tuple[Staged, list[list[torch.Tensor]]] | None = None
        """An update, and the parts of it that belong here, by group."""
        self._side: torch.cuda.Stream | None = None
        self._launched: list[Launched] = []
        """Digests that a load has begun."""

    def are_of(self, model: Any, shapes: Shapes, lora: Mapping[str, Any]) -> bool:
        """Whether these are the slices of this model and these tensors, without adapters."""
        return not lora and model is self._model and list(shapes) == self._shapes

    def load(self, staged: Staged) -> float:
        """Load an update, by copies if that is all there is to it; seconds until the last tensor was in its place.

        Args:
            staged: all names and whole tensors, on the model's device or in host memory. The same object means the same
                memory as before.
        """
        self._launched = []
        if self._copies is None or self._copies[0] is not staged:
            self._copies = (staged, self._parts(staged))
        if self._loaded and self._copies[1]:
            return self._copy(self._copies[1])
        started = time.monotonic()
        with torch.no_grad():
            self._model.load_weights(staged)
        synchronize()
        self._loaded = True
        return time.monotonic() - started

    def load_slices(self, staged: Staged, starts: Sequence[Sequence[int]]) -> float:
        """Copy what this rank has received for itself, begins and all; seconds until the last one was in its place.

        Raises ValueError, before anything is copied: that is not what is live here, or the model makes something else
        of its weights after loading.
        """
        self._launched = []
        if self._copies is None or self._copies[0] is not staged:
            self._copies = (staged, self._matched(staged, starts))
        if self.slices and self.slices[0].view.is_cuda:
            return self._copy(self._copies[1])
        started = time.monotonic()
        with torch.no_grad():
            for group, parts in zip(self._groups, self._copies[1], strict=True):
                _copy([piece.view for piece in group], parts)
        synchronize()
        return time.monotonic() - started

    def _matched(self, staged: Staged, starts: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
        """Source of each slice, by group."""
        found = {(name, tuple(start)): tensor for (name, tensor), start in zip(staged, starts, strict=True)}
        for piece in self.slices:
            part = found.get((piece.name, piece.start))
            if part is None or (part.shape, part.dtype) != (piece.view.shape, piece.view.dtype):
                came = "nothing" if part is None else f"{tuple(part.shape)} of {part.dtype}"
                live = f"{tuple(piece.view.shape)} of {piece.view.dtype} at {piece.start}"
                raise ValueError(f"{piece.name}: {came} came for {live}; take weight_bus.stage_in: server")
        if hasattr(self._model, "post_load_weights") or not _covered(self._model, self.slices):
            raise ValueError(
                f"{type(self._model).__name__} makes something else of its weights than copies; take"
                " weight_bus.stage_in: server"
            )
        return [[found[piece.name, piece.start] for piece in group] for group in self._groups]

    def _copy(self, copies: list[list[torch.Tensor]]) -> float:
        """As `load`; groups are copied and digested in a pipeline."""
        self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        with torch.no_grad():
            for group, digester, parts in zip(self._groups, self._digesters, copies, strict=True):
                _copy([piece.view for piece in group], parts)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
                with torch.cuda.stream(self._side):
                    self._side.wait_event(copied)
                    self._launched.append(digester.launch())
        end.record()
        end.synchronize()
        seconds: float = begin.elapsed_time(end) / 1e3
        return seconds

    def digests(self) -> Digested:
        """What is live now, or was when the last load was over, if nobody has asked since."""
        check_addresses(self._model)
        launched, self._launched = self._launched, []
        with torch.cuda.stream(self._side if launched else None):  # which waits for no forward beside
            launched = launched or [digester.launch() for digester in self._digesters]
            sums = [value for some in launched for value in some.sums()]
        return [(p.name, p.start, p.view.numel(), digest) for p, digest in zip(self.slices, sums, strict=True)]

    def _parts(self, staged: Staged) -> list[list[torch.Tensor]]:
        """Source of each slice, by group; empty if copies alone do not make a load."""
        whole = dict(staged)
        parts = [[_cut(whole[piece.name], piece) for piece in group] for group in self._groups]
        alike = all(
            piece.view.is_cuda and part.dtype == piece.view.dtype
            for piece, part in zip(self.slices, itertools.chain(*parts), strict=True)
        )
        by_copies = alike and not hasattr(self._model, "post_load_weights") and _covered(self._model, self.slices)
        return parts if by_copies else []


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check_addresses(model: Any) -> None:
    """Raise RuntimeError where a parameter has moved: captured graphs keep reading the old memory.

    Digests of where it lies now would prove nothing about what is decoded with.
    """
    global _addresses
    found = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    if _addresses[0] is not model:
        _addresses = (model, found)
    moved = sorted(name for name, address in _addresses[1].items() if found.get(name) != address)
    if moved:
        raise RuntimeError(
            f"{len(moved)} parameters of the model have moved, first {moved[0]!r}: captured graphs go on reading the"
            f" old memory. {type(model).__name__} cannot be updated in place; take a model without quantisation whose"
            " load_weights copies into its parameters"
        )


def _grouped(slices: Sequence[LiveSlice]) -> list[list[LiveSlice]]:
    """Consecutive groups, of about the same number of bytes."""
    sizes = [piece.view.nbytes for piece in slices]
    shares = (begin * GROUPS // max(1, sum(sizes)) for begin in itertools.accumulate(sizes, initial=0))
    numbered = itertools.groupby(zip(shares, slices, strict=False), key=lambda pair: pair[0])
    return [[piece for _, piece in group] for _, group in numbered]


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
        torch._foreach_copy_(*small, non_blocking=True)


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
    sizes = {parameter.data_ptr(): parameter.numel() for parameter in model.parameters()}
    left, begins = dict(sizes), sorted(sizes)
    for piece in slices:
        left[begins[bisect_right(begins, piece.view.data_ptr()) - 1]] -= piece.view.numel()
    return all(rest == 0 or (begin in padded and 0 < rest < sizes[begin]) for begin, rest in left.items())
