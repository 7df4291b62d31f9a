"""Live weights of the torch engine: Hugging Face tensors in, fused tensors that the decode step reads, digests out.

The inverse map is one table: each HF name is a range of rows of one live tensor (q, k and v are rows of `qkv`,
gate and up are rows of `gate_up`, everything else is a live tensor of its own). Loading copies into those rows and
the digest is taken on those rows, so what is digested is what is multiplied with.

Rule of ties: a tied lm_head.weight has no entry; it is sent, held and digested once, as model.embed_tokens.weight.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from rollout_server.engines.base import EngineError
from rollout_server.engines.torch.family import ModelSpec
from weight_bus.digest import slice_digest

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class RowRange:
    """Where an HF tensor lies: rows [start, start + shape[0]) of the live tensor `live`."""

    live: str
    start: int
    shape: tuple[int, ...]


class LayerTensors(NamedTuple):
    """Live tensors of one decoder layer; matrices are [out, in]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


def layout(spec: ModelSpec) -> dict[str, RowRange]:
    """The inverse map of a model: HF name -> rows of a live tensor, in the order of the model."""
    table: dict[str, RowRange] = {EMBEDDING: RowRange("embed", 0, (spec.vocab_size, spec.hidden_size))}
    for index in range(spec.num_layers):
        table.update(_layer_layout(spec, index))
    table["model.norm.weight"] = RowRange("norm", 0, (spec.hidden_size,))
    if not spec.tied:
        table[LM_HEAD] = RowRange("lm_head", 0, (spec.vocab_size, spec.hidden_size))
    return table


def _layer_layout(spec: ModelSpec, index: int) -> dict[str, RowRange]:
    hf, live = f"model.layers.{index}", f"layers.{index}"
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    table: dict[str, RowRange] = {}

    def add(name: str, rows: int, columns: int, *, into: str, start: int = 0, bias: bool = False) -> None:
        table[f"{hf}.{name}.weight"] = RowRange(f"{live}.{into}", start, (rows, columns) if columns else (rows,))
        if bias:
            table[f"{hf}.{name}.bias"] = RowRange(f"{live}.{into}_bias", start, (rows,))

    add("input_layernorm", hidden, 0, into="input_norm")
    add("self_attn.q_proj", q_rows, hidden, into="qkv", bias=spec.qkv_bias)
    add("self_attn.k_proj", kv_rows, hidden, into="qkv", start=q_rows, bias=spec.qkv_bias)
    add("self_attn.v_proj", kv_rows, hidden, into="qkv", start=q_rows + kv_rows, bias=spec.qkv_bias)
    if spec.qk_norm:
        add("self_attn.q_norm", spec.head_dim, 0, into="q_norm")
        add("self_attn.k_norm", spec.head_dim, 0, into="k_norm")
    add("self_attn.o_proj", hidden, q_rows, into="o", bias=spec.o_bias)
    add("post_attention_layernorm", hidden, 0, into="post_norm")
    add("mlp.gate_proj", inner, hidden, into="gate_up", bias=spec.mlp_bias)
    add("mlp.up_proj", inner, hidden, into="gate_up", start=inner, bias=spec.mlp_bias)
    add("mlp.down_proj", hidden, inner, into="down", bias=spec.mlp_bias)
    return table


class LiveWeights:
    """One set of fused weights. `layers`, `embed`, `norm` and `lm_head` are what the forward reads."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.spec = spec
        self.dtype = dtype
        self._layout = layout(spec)
        heights: dict[str, int] = {}
        for rows in self._layout.values():
            heights[rows.live] = max(heights.get(rows.live, 0), rows.start + rows.shape[0])
        self._live = {
            rows.live: torch.zeros(heights[rows.live], *rows.shape[1:], dtype=dtype) for rows in self._layout.values()
        }
        self._views = {
            name: self._live[rows.live].narrow(0, rows.start, rows.shape[0]) for name, rows in self._layout.items()
        }
        self.embed = self._live["embed"]
        self.norm = self._live["norm"]
        self.lm_head = self._live.get("lm_head", self.embed)
        self.layers = [self._layer(index) for index in range(spec.num_layers)]

    def _layer(self, index: int) -> LayerTensors:
        return LayerTensors(*(self._live.get(f"layers.{index}.{field}") for field in LayerTensors._fields))  # type: ignore[arg-type]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The live tensors themselves, by live name ("embed", "layers.0.qkv", ...); not copies."""
        return self._live

    def layout(self) -> Mapping[str, RowRange]:
        """HF name -> rows of a live tensor."""
        return self._layout

    @property
    def num_bytes(self) -> int:
        """Memory of this set."""
        return sum(tensor.nbytes for tensor in self._live.values())

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy HF tensors into the live tensors; any order, each name exactly once.

        Raises:
            EngineError: a tensor is unknown, repeated, missing, or of another shape or dtype. Tensors that came
                before it are already copied: the set is then half updated.
        """
        loaded: set[str] = set()
        for name, tensor in named_tensors:
            self._check(name, tensor, repeated=name in loaded)
            with torch.no_grad():
                self._views[name].copy_(tensor)
            loaded.add(name)
        missing = [name for name in self._layout if name not in loaded]
        if missing:
            raise EngineError(f"{len(missing)} of {len(self._layout)} tensors are missing, the first is {missing[0]!r}")

    def _check(self, name: str, tensor: torch.Tensor, *, repeated: bool) -> None:
        rows = self._layout.get(name)
        if rows is None:
            tie = f" (tied: it is part of {EMBEDDING})" if name == LM_HEAD else ""
            raise EngineError(f"tensor {name!r} is not part of this {self.spec.family} model{tie}")
        if repeated:
            raise EngineError(f"tensor {name!r} came twice")
        if tuple(tensor.shape) != rows.shape:
            raise EngineError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model has {rows.shape}")
        if tensor.dtype != self.dtype:
            raise EngineError(f"tensor {name!r} has dtype {tensor.dtype}, the engine holds {self.dtype}")

    def digests(self) -> dict[str, int]:
        """Digest of every HF tensor, computed in place on the rows of the live tensors."""
        with torch.inference_mode():
            return {name: slice_digest(view) for name, view in self._views.items()}

    def copy(self) -> "LiveWeights":
        """A second set with the same contents and no shared memory."""
        twin = LiveWeights(self.spec, self.dtype)
        with torch.no_grad():
            for name, tensor in self._live.items():
                twin._live[name].copy_(tensor)
        return twin


def read_folder(folder: Path, *, tied: bool, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a Hugging Face folder (one safetensors file, or several with an index), cast to `dtype`.

    Raises:
        EngineError: there are no safetensors files, one that the index names is absent, or the folder holds an
            lm_head that differs from the embedding although config.json says that they are tied.
    """
    files: dict[str, list[str]] = {}
    for name, file in _weight_map(folder).items():
        files.setdefault(file, []).append(name)
    aside: dict[str, torch.Tensor] = {}
    for file, names in files.items():
        with safe_open(str(folder / file), framework="pt") as tensors:
            for name in names:
                # Buffers that old Llama exports carry; the frequencies follow from the config.
                if name.endswith("rotary_emb.inv_freq"):
                    continue
                tensor = tensors.get_tensor(name)
                if tied and name in (EMBEDDING, LM_HEAD):
                    aside[name] = tensor
                if not (tied and name == LM_HEAD):
                    yield name, tensor.to(dtype)
    if LM_HEAD in aside and EMBEDDING in aside and not torch.equal(aside[LM_HEAD], aside[EMBEDDING]):
        raise EngineError(
            f"{folder}: tie_word_embeddings is true but {LM_HEAD} differs from {EMBEDDING}; "
            "set it to false in config.json, or remove the one that is wrong"
        )


def _weight_map(folder: Path) -> dict[str, str]:
    """HF name -> file name within the folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file or not (folder / file).is_file():
                raise EngineError(f"{index}: weight_map names {file!r}, which is not a file in this folder")
        return weight_map
    single = folder / "model.safetensors"
    if not single.is_file():
        raise EngineError(
            f"{folder}: neither model.safetensors nor model.safetensors.index.json; only safetensors load"
        )
    with safe_open(str(single), framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single.name)
