"""What a record of a family says: its tensors by name and shape, and what of its config.json means what. No torch.

A *logical tensor* is one of the checkpoint; digests, manifests and exports speak of these alone. A *parameter* is what
transformers holds, a *live tensor* what SGLang holds; both are blocks of logical tensors, laid side by side.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Projection = Literal[
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"
]
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LAYERS = "model.layers."
TOWER = "visual."
"""How names of a vision tower's tensors begin in a folder."""
DIVIDED = frozenset({"query", "key", "inner", "expert_inner", "shared_inner", "vocabulary"})
"""Sizes that tensor ranks divide, of the learner's mesh and of an engine."""
Keys = Mapping[str, Any]
"""Of config.json, with what it leaves out."""


class Weight(NamedTuple):
    """A tensor of a layer. `*` in its name stands for each expert.

    Sizes are words (`Sizes.dims`); rows that lie one after the other are joined by `+`.
    """

    name: str
    rows: str
    columns: str = ""
    only: str = ""
    """A key of config.json that must be true, or it is not there."""
    whole: bool = False
    """Tensor ranks have all of it, although its sizes are divided."""


class Part(NamedTuple):
    """A block of a logical tensor, and where it lies in a parameter or live tensor."""

    name: str
    """Of the logical tensor."""
    shape: tuple[int, ...]
    """Of the whole logical tensor."""
    start: tuple[int, ...]
    """Where the block begins in it."""
    size: tuple[int, ...]
    """Of the block."""
    holder: str
    """Name of the parameter or live tensor."""
    at: tuple[int, ...]
    """Where the block begins there; dimensions in front that a logical tensor has not are of size one."""


def projections(*names: str, rows: str, columns: str, only: str = "", bias: str | None = None) -> tuple[Weight, ...]:
    """Weights of linear modules; with a bias where the key `bias` is true, or always where it is empty."""
    made = [Weight(f"{name}.weight", rows, columns, only) for name in names]
    return (*made, *(Weight(f"{name}.bias", rows, "", bias) for name in names if bias is not None))


def attention(bias: str | None = None, output: str | None = None, *norms: Weight) -> tuple[Weight, ...]:
    """q, k, v and o; `bias` and `output` are keys for the biases of the first three and the last (`projections`)."""
    return (
        *projections("self_attn.q_proj", rows="query", columns="hidden", bias=bias),
        *projections("self_attn.k_proj", "self_attn.v_proj", rows="key", columns="hidden", bias=bias),
        *projections("self_attn.o_proj", rows="hidden", columns="query", bias=output),
        *norms,
    )


def gated(prefix: str, inner: str, bias: str | None = None) -> tuple[Weight, ...]:
    """gate, up and down."""
    return (
        *projections(f"{prefix}.gate_proj", f"{prefix}.up_proj", rows=inner, columns="hidden", bias=bias),
        *projections(f"{prefix}.down_proj", rows="hidden", columns=inner, bias=bias),
    )


HEAD_NORMS = (Weight("self_attn.q_norm.weight", "head"), Weight("self_attn.k_norm.weight", "head"))
"""Of each head."""
WHOLE_NORMS = tuple(Weight(f"self_attn.{w[0]}_norm.weight", w, whole=True) for w in ("query", "key"))
"""Of all heads together."""
EXPERTS = (Weight("mlp.gate.weight", "experts", "hidden"), *gated("mlp.experts.*", "expert_inner"))
LIVE = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.experts.w13_weight": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.w2_weight": ("mlp.experts.*.down_proj.weight",),
}
"""SGLang's live tensors, or modules, by the tensors or modules of the checkpoint that lie in their rows."""
FUSED = {
    "mlp.experts.gate_up_proj": ("mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.*.down_proj.weight",),
}
"""Parameters of transformers, alike; experts are their first dimension."""


def every_layer(window: str) -> Callable[[Keys, int], int | None]:
    """The window of all layers is this key's."""
    return lambda keys, layer: keys.get(window)


def by_layer_types(keys: Keys, layer: int) -> int | None:
    """Layers of `sliding_attention` have a window; where `layer_types` is left out, as Qwen's have it."""
    if (types := keys.get("layer_types")) is not None:
        return keys["sliding_window"] if types[layer] == "sliding_attention" else None
    return keys.get("sliding_window") if keys.get("use_sliding_window") and layer >= keys["max_window_layers"] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture, by the model_type of its config.json."""

    model_type: str
    attention: tuple[Weight, ...]
    mlp: tuple[Weight, ...] = gated("mlp", "inner")
    """Of a layer without experts."""
    moe: tuple[Weight, ...] = ()
    """Of a layer with experts."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Modules of a layer with a weight of the hidden size."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for a key that is left out, where that does not follow from the others."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Keys of words for sizes, where they are not those of Qwen3 (`Sizes.of`)."""
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: FUSED)
    live: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LIVE)
    has_experts: Callable[[Keys, int], bool] = lambda keys, layer: True
    """Whether a layer of a family with experts has them."""
    window: Callable[[Keys, int], int | None] = by_layer_types
    """Tokens that a layer's attention sees, the token itself counted; None for all."""
    scale: Callable[[Keys], float | None] = lambda keys: None
    """Factor of scores of attention; None is 1 / sqrt(head size)."""
    logits: Callable[[Keys], float] = lambda keys: 1.0
    """Factor of the output head's products."""
    caps: tuple[str, str] = ("attn_logit_softcapping", "final_logit_softcapping")
    """Keys that bound scores of attention, and logits, by a tanh, where they are set."""
    buffers: tuple[str, ...] = ("model.rotary_emb.",)
    """Beginnings of names of the state that no file has and config.json defines."""
    refused: str = ""
    """Why it is not trained, where it is only described."""
    against_tensor: str = ""
    """Why learner.mesh.tensor does not divide it; empty where it does."""
    windows_in_sglang: bool = False
    """Whether SGLang's attention has its windows: some models of SGLang leave them out."""
    in_torch_engine: bool = False
    """Whether rollout.engine `torch` serves it."""
    routed_in_sglang: bool = True
    """Whether SGLang says to which experts it has sent a token."""
    decides: tuple[str, ...] = ()
    """Keys of config.json that change what is computed, besides those of all families: ends must agree in them."""
    text: str = ""
    """Of a model that takes pictures: the model_type of its decoder."""
    tower: tuple[str, str] = ("", "")
    """The module and the class of its vision tower in transformers."""

    def layer(self, keys: Keys, *, has_experts: bool) -> Iterator[Weight]:
        """Tensors of a layer."""
        rest = self.moe if has_experts else self.mlp
        norms = (Weight(f"{name}.weight", "hidden") for name in self.norms)
        return (w for w in (*self.attention, *rest, *norms) if not w.only or keys.get(w.only))
