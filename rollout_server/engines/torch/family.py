"""Which models the torch engine serves: config.json -> `ModelSpec`, or a refusal by key.

The engine implements the families of slipstream/families exactly; everything a config can ask for beyond them
is refused here, because a decoder that is nearly the model gives behaviour logprobs that are nearly right.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollout_server.engines.base import EngineError
from slipstream.families.experts import Experts, experts_of
from slipstream.families.pictures import Vision, decoder_of, vision_of
from slipstream.families.sizes import Sizes, heads_of
from slipstream.families.table import FAMILIES

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelSpec:
    """Shape of a decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    tied: bool
    """lm_head and the input embedding are one tensor."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Norms of queries and keys, of each head."""
    qk_norm_whole: bool
    """Of all heads together (OLMo)."""
    inv_freq: torch.Tensor
    """[head_dim / 2] float32 rotary frequencies."""
    rope_scaling: float
    """Factor on cos and sin (yarn's attention factor; 1 elsewhere)."""
    vision: Vision | None = None
    """Of a model that takes pictures."""
    experts: Experts | None = None
    has_experts: tuple[bool, ...] = ()
    """Of each layer; `expert_size` is the width of one, and the weights of a token's experts add up to one where
    `normalised`."""
    expert_size: int = 0
    normalised: bool = False
    axes: tuple[int, ...] = ()
    """[head_dim / 2] by which axis each pair turns where positions have three; empty elsewhere."""


def read_spec(folder: Path, max_context: int) -> ModelSpec:
    """Read a folder's `config.json`; `max_context` is most tokens of prompt and answer.

    Raises EngineError where the model is of another family, or asks for something the engine does not do exactly.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise EngineError(f"{path} does not exist; model.path must be a Hugging Face model folder")
    raw = json.loads(path.read_text(encoding="utf-8"))
    vision, raw = vision_of(raw), decoder_of(raw)
    model_type = raw.get("model_type", "")
    if model_type not in FAMILIES or not FAMILIES[model_type].in_torch_engine:
        served = ", ".join(name for name, family in FAMILIES.items() if family.in_torch_engine)
        raise EngineError(
            f"{path}: model_type {model_type!r} is not served by the torch engine "
            f"(it serves {served}); use rollout.engine: sglang"
        )
    if raw.get("quantization_config") is not None:
        raise EngineError(f"{path}: quantization_config is set, the torch engine serves unquantized weights only")
    config = CONFIG_MAPPING[model_type].from_dict(raw)
    _refuse_what_differs(path, config, max_context)
    heads, (inv_freq, rope_scaling) = heads_of(config.to_dict()), _rope(path, config)
    sizes = Sizes.of(config.to_dict())
    there = {weight.name: weight for weight in sizes.layer(has_experts=False)}
    norm = there.get("self_attn.q_norm.weight")
    return ModelSpec(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads.query,
        num_kv_heads=heads.key_value,
        head_dim=heads.size,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        tied=bool(config.tie_word_embeddings),
        qkv_bias="self_attn.q_proj.bias" in there,
        o_bias="self_attn.o_proj.bias" in there,
        mlp_bias="mlp.up_proj.bias" in there,
        qk_norm=norm is not None and not norm.whole,
        qk_norm_whole=norm is not None and norm.whole,
        inv_freq=inv_freq,
        rope_scaling=rope_scaling,
        vision=vision,
        axes=_axes(path, config) if vision is not None else (),
        experts=experts_of(config.to_dict()),
        has_experts=sizes.has_experts,
        expert_size=sizes.dims.get("expert_inner", 0),
        normalised=bool(getattr(config, "norm_topk_prob", False)),
    )


def _axes(path: Path, config: Any) -> tuple[int, ...]:
    """Of M-RoPE, by its sections."""
    sections = (config.rope_parameters or {}).get("mrope_section") or ()
    axes = tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    if len(axes) * 2 != heads_of(config.to_dict()).size or len(sections) != 3:
        raise EngineError(f"{path}: mrope_section {list(sections)} is not of three axes that fill half a head")
    return axes


def _refuse_what_differs(path: Path, config: Any, max_context: int) -> None:
    if config.hidden_act != "silu":
        raise EngineError(f"{path}: hidden_act {config.hidden_act!r}, the torch engine does silu only")
    if getattr(config, "clip_qkv", None) is not None:
        raise EngineError(f"{path}: clip_qkv {config.clip_qkv}, the torch engine clips nothing")
    window = getattr(config, "sliding_window", None)
    if (
        window is not None
        and window < max_context
        and "sliding_attention" in (getattr(config, "layer_types", None) or ())
    ):
        raise EngineError(
            f"{path}: use_sliding_window with sliding_window {window} below the context of {max_context} tokens; "
            "the torch engine attends to the whole context only"
        )
    if max_context > config.max_position_embeddings:
        raise EngineError(
            f"{path}: max_position_embeddings {config.max_position_embeddings} is below the context of {max_context} "
            "tokens (data.max_prompt_tokens + rollout.max_new_tokens); lower one of the two"
        )


def _rope(path: Path, config: Any) -> tuple[torch.Tensor, float]:
    """Rotary frequencies as transformers computes them (RoFormer, Su et al. 2021, and its scaled variants)."""
    parameters = config.rope_parameters or {}
    rope_type = parameters.get("rope_type")
    if rope_type not in STATIC_ROPE_TYPES:
        raise EngineError(
            f"{path}: rope_type {rope_type!r} of rope_parameters is not served by the torch engine "
            f"(it serves {', '.join(STATIC_ROPE_TYPES)}: frequencies that do not depend on the length)"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise EngineError(f"{path}: partial_rotary_factor {parameters['partial_rotary_factor']}, only 1.0 is served")
    if rope_type != "default":
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))
        return inv_freq.float(), float(scaling)
    size = heads_of(config.to_dict()).size
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
