"""Live weights of the torch engine: Hugging Face tensors in, fused tensors and digests out.

Each HF tensor is a range of rows of one live tensor (q, k and v are rows of `qkv`, gate and up of `gate_up`, everything
else is a live tensor of its own). Loading copies into those rows and the digest is taken on them: what is digested is
what is multiplied with. Rule of ties: a tied lm_head.weight is sent, held and digested as model.embed_tokens.weight.

With LoRA updates are adapters, beside weights that stay as the folder has them. Nothing is merged: the forward adds
what an adapter makes of its input, as the learner does, so here too what is digested is what is multiplied with.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

from configs.learner import Lora
from rollout_server.engines.base import EngineError
from rollout_server.engines.torch.family import ModelSpec
from slipstream.families.record import EMBEDDING, HEAD, NORM
from slipstream.weight_files import weight_files
from weight_bus.adapters import SCALE, is_adapted, names_of, scale_digest
from weight_bus.digest import slice_digest


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
    table[NORM] = RowRange("norm", 0, (spec.hidden_size,))
    if not spec.tied:
        table[HEAD] = RowRange("lm_head", 0, (spec.vocab_size, spec.hidden_size))
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
    if spec.qk_norm_whole:
        add("self_attn.q_norm", q_rows, 0, into="q_norm")
        add("self_attn.k_norm", kv_rows, 0, into="k_norm")
    add("self_attn.o_proj", hidden, q_rows, into="o", bias=spec.o_bias)
    add("post_attention_layernorm", hidden, 0, into="post_norm")
    if spec.experts is not None and spec.has_experts[index]:
        inner = spec.expert_size
        add("mlp.gate", spec.experts.number, hidden, into="router")
        for expert in range(spec.experts.number):
            name, start = f"mlp.experts.{expert}", 2 * expert * inner
            add(f"{name}.gate_proj", inner, hidden, into="experts_gate_up", start=start)
            add(f"{name}.up_proj", inner, hidden, into="experts_gate_up", start=start + inner)
            add(f"{name}.down_proj", hidden, inner, into="experts_down", start=expert * hidden)
        return table
    add("mlp.gate_proj", inner, hidden, into="gate_up", bias=spec.mlp_bias)
    add("mlp.up_proj", inner, hidden, into="gate_up", start=inner, bias=spec.mlp_bias)
    add("mlp.down_proj", hidden, inner, into="down", bias=spec.mlp_bias)
    return table


class Adapter(NamedTuple):
    """Adds `scale` B A x to rows of what a fused weight makes of x."""

    a: torch.Tensor
    b: torch.Tensor
    start: int
    scale: float

    def add(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add to [n, out] what the adapter makes of [n, in]."""
        out[:, self.start : self.start + len(self.b)].addmm_(x @ self.a.t(), self.b.t(), alpha=self.scale)


class Layer(dict[str, torch.Tensor]):
    """Fused weights of a decoder layer by name, and the adapters of each."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[str, list[Adapter]] = {}

    def adapt(self, name: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out`, which fused weight `name` has made of `x`, with what its adapters add; in place."""
        for adapter in self.adapters.get(name, ()):
            adapter.add(x, out)
        return out


class LiveWeights:
    """One set of fused weights. `layers`, `embed`, `norm` and `lm_head` are what the forward reads.

    `tensors` has them by live name ("embed", "layers.0.qkv", ...; matrices [out, in]), `layout` the rows of them by HF
    name. A layer has by name: input_norm, qkv, o, post_norm, gate_up, down; some have q_norm, k_norm, and ..._bias.

    Args:
        lora: adapters that updates carry in place of the weights.
        base: weights to share, which never change then.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, lora: Lora | None = None, base: "LiveWeights | None" = None
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.lora = lora
        self.layout = layout(spec)
        # The last HF tensor of a live one reaches to its end.
        ends = {rows.live: (rows.start + rows.shape[0], *rows.shape[1:]) for rows in self.layout.values()}
        self.tensors: dict[str, torch.Tensor] = (
            base.tensors if base is not None else {n: torch.zeros(shape, dtype=dtype) for n, shape in ends.items()}
        )
        self._views = {
            name: self.tensors[rows.live].narrow(0, rows.start, rows.shape[0]) for name, rows in self.layout.items()
        }
        self._updated = dict(self._views)
        """What an update carries, by name."""
        self.embed = self.tensors["embed"]
        self.norm = self.tensors["norm"]
        self.lm_head = self.tensors.get("lm_head", self.embed)
        self.layers = [Layer() for _ in range(spec.num_layers)]
        for name, tensor in self.tensors.items():
            if name.startswith("layers."):
                _, index, part = name.split(".")
                self.layers[int(index)][part] = tensor
        if lora is not None:
            self._updated = {}
            for name, rows in self.layout.items():
                if is_adapted(name, lora.projections):
                    self._add_adapter(name, rows, lora)
            self._views |= self._updated

    def _add_adapter(self, name: str, rows: RowRange, lora: Lora) -> None:
        """An adapter of zeros for an HF weight."""
        a, b = torch.zeros(lora.rank, rows.shape[1], dtype=self.dtype), torch.zeros(rows.shape[0], lora.rank)
        adapter = Adapter(a, b.to(self.dtype), rows.start, lora.scale)
        self._updated |= zip(names_of(name), adapter[:2], strict=True)
        _, index, part = rows.live.split(".")
        self.layers[int(index)].adapters.setdefault(part, []).append(adapter)

    @property
    def num_bytes(self) -> int:
        """Memory of this set, what it shares included."""
        return sum(view.nbytes for view in self._views.values())

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy an update into the live tensors: HF tensors, or adapters; any order, each name exactly once.

        Raises EngineError where a tensor is unknown, repeated, missing, or of another shape or dtype. Those before it
        are already copied: the set is then half updated.
        """
        self._copy(named_tensors, self._updated)

    def fill(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the HF tensors of the model's folder into the live tensors; raises as `load`."""
        self._copy(named_tensors, {name: self._views[name] for name in self.layout})

    def _copy(self, named_tensors: Iterable[tuple[str, torch.Tensor]], views: dict[str, torch.Tensor]) -> None:
        loaded: set[str] = set()
        for name, tensor in named_tensors:
            self._check(name, tensor, views.get(name), repeated=name in loaded)
            with torch.no_grad():
                views[name].copy_(tensor)
            loaded.add(name)
        missing = [name for name in views if name not in loaded]
        if missing:
            raise EngineError(f"{len(missing)} of {len(views)} tensors are missing, the first is {missing[0]!r}")

    def _check(self, name: str, tensor: torch.Tensor, view: torch.Tensor | None, *, repeated: bool) -> None:
        if view is None:
            tie = f" (tied: it is part of {EMBEDDING})" if name == HEAD else ""
            lora = f" (learner.lora.rank is {self.lora.rank} here, so updates are adapters)" if self.lora else ""
            adapter = " (an adapter; set learner.lora here as the learner has it)" if ".lora_" in name else ""
            raise EngineError(f"tensor {name!r} is not part of this {self.spec.family} model{adapter or lora or tie}")
        if repeated:
            raise EngineError(f"tensor {name!r} came twice")
        if tensor.shape != view.shape:
            raise EngineError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model has {tuple(view.shape)}")
        if tensor.dtype != self.dtype:
            raise EngineError(f"tensor {name!r} has dtype {tensor.dtype}, the engine holds {self.dtype}")

    def digests(self) -> dict[str, int]:
        """Digest of every HF tensor and adapter, computed in place on what the forward multiplies with."""
        with torch.inference_mode():
            found = {name: slice_digest(view) for name, view in self._views.items()}
        return found if self.lora is None else {**found, SCALE: scale_digest(self.lora.scale)}

    def copy(self) -> "LiveWeights":
        """A second set with the same contents, which no update of this one changes."""
        twin = LiveWeights(self.spec, self.dtype, self.lora, base=self if self.lora is not None else None)
        twin.load(self._updated.items())
        return twin


def read_folder(folder: Path, *, tied: bool, dtype: torch.dtype, skip: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a folder (one safetensors file, or several with an index), cast to `dtype`.

    Those whose names begin with `skip` are left out. Raises EngineError where there are no such files, one that the
    index names is absent, or the lm_head differs from the embedding although config.json says that they are tied.
    """
    aside: dict[str, torch.Tensor] = {}
    for file in sorted(set(weight_files(folder, EngineError).values())):
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                # Buffers that old Llama exports carry; the frequencies follow from the config.
                if name.endswith("rotary_emb.inv_freq") or (skip and name.startswith(skip)):
                    continue
                tensor = opened.get_tensor(name)
                if tied and name in (EMBEDDING, HEAD):
                    aside[name] = tensor
                if not (tied and name == HEAD):
                    yield name, tensor.to(dtype)
    if HEAD in aside and EMBEDDING in aside and not torch.equal(aside[HEAD], aside[EMBEDDING]):
        raise EngineError(
            f"{folder}: tie_word_embeddings is true but {HEAD} differs from {EMBEDDING}; "
            "set it to false in config.json, or remove the one that is wrong"
        )
