"""Live weights of the torch engine: Hugging Face tensors in, fused tensors and digests out.

Each HF tensor is a range of rows of one live tensor (q, k and v are rows of `qkv`, gate and up of `gate_up`, everything
else is a live tensor of its own). Loading copies into those rows and the digest is taken on them: what is digested is
what is multiplied with. Rule of ties: a tied lm_head.weight is sent, held and digested as model.embed_tokens.weight.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

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


def layout(spec: ModelSpec) -> dict[str, RowRange]:
    """The inverse map, in the model's order: HF name to rows of a live tensor."""
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
    """One set of fused weights. `layers`, `embed`, `norm` and `lm_head` are what the forward reads.

    `tensors` has them by live name ("embed", "layers.0.qkv", ...; matrices [out, in]), `layout` the rows of them by HF
    name. A layer has by name: input_norm, qkv, o, post_norm, gate_up, down; some have q_norm, k_norm, and ..._bias.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self.spec = spec
        self.dtype = dtype
        self.layout = layout(spec)
        # The last HF tensor of a live one reaches to its end.
        ends = {rows.live: (rows.start + rows.shape[0], *rows.shape[1:]) for rows in self.layout.values()}
        self.tensors = {live: torch.zeros(shape, dtype=dtype) for live, shape in ends.items()}
        self._views = {
            name: self.tensors[rows.live].narrow(0, rows.start, rows.shape[0]) for name, rows in self.layout.items()
        }
        self.embed = self.tensors["embed"]
        self.norm = self.tensors["norm"]
        self.lm_head = self.tensors.get("lm_head", self.embed)
        self.layers: list[dict[str, torch.Tensor]] = [{} for _ in range(spec.num_layers)]
        for name, tensor in self.tensors.items():
            if name.startswith("layers."):
                _, index, part = name.split(".")
                self.layers[int(index)][part] = tensor

    @property
    def num_bytes(self) -> int:
        """Memory of this set."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy HF tensors into the live tensors; any order, each name exactly once.

        Raises EngineError where a tensor is unknown, repeated, missing, or of another shape or dtype. Those before it
        are already copied: the set is then half updated.
        """
        loaded: set[str] = set()
        for name, tensor in named_tensors:
            self._check(name, tensor, repeated=name in loaded)
            with torch.no_grad():
                self._views[name].copy_(tensor)
            loaded.add(name)
        missing = [name for name in self.layout if name not in loaded]
        if missing:
            raise EngineError(f"{len(missing)} of {len(self.layout)} tensors are missing, the first is {missing[0]!r}")

    def _check(self, name: str, tensor: torch.Tensor, *, repeated: bool) -> None:
        rows = self.layout.get(name)
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
        twin.load(self._views.items())
        return twin


def read_folder(folder: Path, *, tied: bool, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a folder (one safetensors file, or several with an index), cast to `dtype`.

    Raises EngineError where there are no such files, one that the index names is absent, or the lm_head differs from
    the embedding although config.json says that they are tied.
    """
    aside: dict[str, torch.Tensor] = {}
    for file in _files(folder):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                # Buffers that old Llama exports carry; the frequencies follow from the config.
                if name.endswith("rotary_emb.inv_freq"):
                    continue
                tensor = opened.get_tensor(name)
                if tied and name in (EMBEDDING, LM_HEAD):
                    aside[name] = tensor
                if not (tied and name == LM_HEAD):
                    yield name, tensor.to(dtype)
    if LM_HEAD in aside and EMBEDDING in aside and not torch.equal(aside[LM_HEAD], aside[EMBEDDING]):
        raise EngineError(
            f"{folder}: tie_word_embeddings is true but {LM_HEAD} differs from {EMBEDDING}; "
            "set it to false in config.json, or remove the one that is wrong"
        )


def _files(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.is_file():
        if single.is_file():
            return [single]
        raise EngineError(f"{folder}: neither {single.name} nor {index.name}; only safetensors load")
    names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise EngineError(f"{index}: weight_map names {name!r}, which is not a file in this folder")
    return [folder / name for name in names]
