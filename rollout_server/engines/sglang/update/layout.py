"""Inverse map of SGLang's fusions: Hugging Face tensor to slice of a live tensor.

Stated rules. Fused projections: q, k, v are rows of `qkv_proj`, gate and up rows of `gate_up_proj`. Tensor
parallelism: each rank holds a slice, named by where it begins in the Hugging Face tensor; replicas (norms, KV
heads when there are more ranks than heads) begin at the same place on several ranks and must be equal there. Padded
vocabulary: the rows past the real vocabulary belong to no Hugging Face tensor. Ties: a tied lm_head is the
embedding, under the embedding's name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

QKV = {"q_proj": 0, "k_proj": 1, "v_proj": 2}
GATE_UP = {"gate_proj": 0, "up_proj": 1}


@dataclass(frozen=True, slots=True)
class LiveSlice:
    """This rank's part of a Hugging Face tensor, a view into the live tensor."""

    name: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    view: torch.Tensor


def live_slices(model: Any, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[LiveSlice]:
    """A slice for each (name, full shape). Raises KeyError: no such tensor; ValueError: another shape."""
    modules = dict(model.named_modules())
    for name, shape in tensors:
        path, _, leaf = name.rpartition(".")
        yield _live_slice(modules, name, shape, path=path, leaf=leaf)


def _live_slice(modules: dict[str, Any], name: str, shape: tuple[int, ...], *, path: str, leaf: str) -> LiveSlice:
    parent, _, last = path.rpartition(".")
    if last in QKV and f"{parent}.qkv_proj" in modules:
        module = modules[f"{parent}.qkv_proj"]
        view, first = _rows_of_qkv(module, getattr(module, leaf), QKV[last])
        start = (first, *(0,) * (len(shape) - 1))
    elif last in GATE_UP and f"{parent}.gate_up_proj" in modules:
        module = modules[f"{parent}.gate_up_proj"]
        rows = module.output_sizes[GATE_UP[last]] // module.tp_size
        view = getattr(module, leaf).narrow(0, rows * GATE_UP[last], rows)
        start = (module.tp_rank * rows, *(0,) * (len(shape) - 1))
    else:
        view, start = _whole_or_sliced(modules[path], leaf, shape)
    view = view.detach()
    inside = all(s + n <= full for s, n, full in zip(start, view.shape, shape, strict=True))
    if view.dim() != len(shape) or not inside:
        raise ValueError(f"{name}: the live slice {tuple(view.shape)} at {start} is not inside {shape}")
    return LiveSlice(name, shape, start, view)


def _rows_of_qkv(module: Any, tensor: torch.Tensor, which: int) -> tuple[torch.Tensor, int]:
    """Rows of q, k or v, and where they begin in the Hugging Face tensor."""
    q_rows, kv_rows = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
    if which == 0:
        return tensor.narrow(0, 0, q_rows), module.tp_rank * q_rows
    first = (module.tp_rank // module.num_kv_head_replicas) * kv_rows
    return tensor.narrow(0, q_rows + (which - 1) * kv_rows, kv_rows), first


def _whole_or_sliced(module: Any, leaf: str, shape: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...]]:
    tensor = getattr(module, leaf)
    zeros = (0,) * len(shape)
    indices = getattr(module, "shard_indices", None)
    if indices is not None:  # vocabulary: padded rows are outside
        first, end = indices.org_vocab_start_index, min(indices.org_vocab_end_index, shape[0])
        return tensor.narrow(0, 0, end - first), (first, *zeros[1:])
    columns = getattr(module, "input_size_per_partition", None)
    if leaf == "weight" and columns is not None and len(shape) == 2 and columns < shape[1]:
        return tensor, (0, module.tp_rank * columns)
    return tensor, zeros
