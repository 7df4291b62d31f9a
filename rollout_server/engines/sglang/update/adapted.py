"""LoRA in a scheduler: adapters are merged into the folder's weights at every update.

SGLang's kernels read whole weights, so each projection is W + alpha / rank · B A, made anew for every version, slice by
slice, from a copy of W in host memory: nothing is ever subtracted, so nothing drifts. What the forward reads is proven
in three parts: the kept copy and the adapters by their own digests, which are the manifest's, and the live weights by
the digest of what was made of these two; a live weight that has another one counts as wrong. A merged weight is rounded
to the engine's dtype, which the learner's sum is not: in bfloat16 logprobs differ by that.

Memory: the adapted slices once more on the host, and one of them at a time in float32 on the device.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from rollout_server.engines.sglang.update.layout import LiveSlice, live_slices
from rollout_server.engines.sglang.update.live import Digested, Shapes, Staged, check_addresses, synchronize
from weight_bus.adapters import SCALE, is_adapted, names_of, scale_digest
from weight_bus.digest import TensorSlice, slice_digest, slice_digests
from weight_bus.digest.definition import MASK


class AdaptedWeights:
    """The folder's tensors and the adapters of this rank. Made before the first update.

    Args:
        lora: as `StagingFolder.adapt` describes it.

    Raises as `live_slices`; ValueError: the model makes something else of its weights after loading.
    """

    def __init__(self, model: Any, shapes: Shapes, lora: Mapping[str, Any]) -> None:
        if hasattr(model, "post_load_weights"):
            raise ValueError(
                f"{type(model).__name__} changes its weights after loading; learner.lora cannot merge them"
            )
        self._model, self._lora, self._shapes = model, dict(lora), list(shapes)
        self._slices = list(live_slices(model, self._shapes))
        chosen = [piece for piece in self._slices if is_adapted(piece.name, lora["projections"])]
        self._kept = {piece.key: _on_host(piece.view) for piece in chosen}
        self._made = dict(zip(self._kept, slice_digests(map(_part, chosen)), strict=True))
        """Digest of each adapted slice as it was made last; at first it is the folder's."""
        self._base = dict(self._made)
        self._adapters: dict[str, torch.Tensor] = {}

    def are_of(self, model: Any, shapes: Shapes, lora: Mapping[str, Any]) -> bool:
        """Whether these are the slices of this model and these tensors, with such adapters."""
        return model is self._model and list(shapes) == self._shapes and dict(lora) == self._lora

    def load(self, staged: Staged) -> float:
        """Hold these adapters, and make every adapted weight anew; seconds that it took.

        Raises ValueError where an adapter is missing, unknown or of another shape: nothing is touched then.
        """
        started = time.monotonic()
        device = self._slices[0].view.device  # staged they may lie in host memory, or on rank 0's GPU
        adapters = {name: tensor.detach().to(device, copy=True) for name, tensor in staged}
        self._check(adapters)
        self._adapters = adapters
        with torch.no_grad():
            for piece in self._slices:
                if piece.key in self._kept:
                    self._make(piece)
        synchronize()
        return time.monotonic() - started

    def _make(self, piece: LiveSlice) -> None:
        a, b = (self._adapters[name].float() for name in names_of(piece.name))
        (first_row, first_column), (rows, columns) = piece.start, piece.view.shape
        kept = self._kept[piece.key].to(piece.view.device)
        self._base[piece.key] = slice_digest(kept, piece.full_shape, piece.start)
        b, a = b[first_row : first_row + rows], a[:, first_column : first_column + columns]
        made = torch.addmm(kept.float(), b, a, alpha=self._lora["scale"]).to(kept.dtype)
        self._made[piece.key] = slice_digest(made, piece.full_shape, piece.start)
        piece.view.copy_(made)

    def _check(self, adapters: Mapping[str, torch.Tensor]) -> None:
        rank = self._lora["rank"]
        expected: dict[str, tuple[int, ...]] = {}
        for piece in self._slices:
            if piece.key in self._kept:
                outputs, inputs = piece.full_shape
                expected |= dict(zip(names_of(piece.name), ((rank, inputs), (outputs, rank)), strict=True))
        found = {name: tuple(tensor.shape) for name, tensor in adapters.items()}
        for name in [*expected, *found]:
            if found.get(name) != expected.get(name):
                raise ValueError(
                    f"{name}: the update has {found.get(name)}, learner.lora means {expected.get(name)} here"
                )

    def digests(self) -> Digested:
        """What is held as it is now: of an adapted slice what it was made from, if it is what was made."""
        check_addresses(self._model)
        found: Digested = []
        for piece, live in zip(self._slices, slice_digests(map(_part, self._slices)), strict=True):
            if piece.key in self._kept:
                base = self._base[piece.key]
                live = base if live == self._made[piece.key] else ~base & MASK  # which is certainly another one
            found.append((piece.name, piece.start, piece.view.numel(), live))
        for name, tensor in self._adapters.items():
            found.append((name, (0,) * tensor.dim(), tensor.numel(), slice_digest(tensor)))
        return [*found, (SCALE, (0,), 1, scale_digest(self._lora["scale"]))]


def _part(piece: LiveSlice) -> TensorSlice:
    return TensorSlice(piece.view, piece.full_shape, piece.start)


def _on_host(view: torch.Tensor) -> torch.Tensor:
    copied = torch.empty(view.shape, dtype=view.dtype, pin_memory=view.is_cuda)
    return copied.copy_(view)
