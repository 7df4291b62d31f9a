"""The families that are trained, a record each. A new one: a record here, and a line in docs/reference/families.md."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.families.record import (
    EXPERTS,
    HEAD_NORMS,
    WHOLE_NORMS,
    Family,
    Keys,
    attention,
    every_layer,
    gated,
    projections,
)
from slipstream.families.refused import REFUSED

FUSED_MLP = (
    *projections("mlp.gate_up_proj", rows="inner+inner", columns="hidden"),
    *projections("mlp.down_proj", rows="hidden", columns="inner"),
)
BIASED = ("attention_bias", "attention_bias")
ONE_MATRIX = "its checkpoint has gate and up in one matrix, whose rows tensor ranks would not divide alike"
BY_EXPERTS = "its experts are divided by learner.mesh.expert"
ONE_NORM = "it norms all heads together, and tensor ranks have some of them"


def _gemma_window(keys: Keys, layer: int) -> int | None:
    """Every sixth layer sees all, or every second one."""
    types, pattern = keys.get("layer_types"), keys["sliding_window_pattern"]
    slides = types[layer] == "sliding_attention" if types is not None else (layer + 1) % pattern
    return keys["sliding_window"] if slides else None


def _sparse_as_qwen(keys: Keys, layer: int) -> bool:
    return layer not in keys["mlp_only_layers"] and (layer + 1) % keys["decoder_sparse_step"] == 0


_QWEN2 = Family(
    model_type="qwen2",
    attention=attention(""),
    defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    in_torch_engine=True,
)
_GEMMA3 = Family(
    model_type="gemma3_text",
    attention=attention(*BIASED, *HEAD_NORMS),
    norms=(
        *("input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "sliding_window_pattern": 6,
    },
    window=_gemma_window,
    windows_in_sglang=True,
    scale=lambda keys: float(keys["query_pre_attn_scalar"]) ** -0.5,
    buffers=("model.rotary_emb.", "model.embed_tokens.embed_scale"),
    decides=(
        *("layer_types", "sliding_window_pattern", "query_pre_attn_scalar", "rope_local_base_freq"),
        *("attn_logit_softcapping", "final_logit_softcapping", "hidden_activation"),
    ),
)
_RECORDS = (
    Family(
        model_type="llama",
        attention=attention(*BIASED),
        mlp=gated("mlp", "inner", "mlp_bias"),
        in_torch_engine=True,
    ),
    _QWEN2,
    Family(
        model_type="qwen3",
        attention=attention(*BIASED, *HEAD_NORMS),
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        in_torch_engine=True,
    ),
    replace(
        _QWEN2,
        model_type="qwen2_vl",
        text="qwen2",
        tower=("transformers.models.qwen2_vl.modeling_qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),
    ),
    replace(
        _QWEN2,
        model_type="qwen2_5_vl",
        text="qwen2",
        tower=("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
    ),
    Family(
        model_type="mistral",
        attention=attention(),
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        window=every_layer("sliding_window"),
    ),
    replace(
        _GEMMA3,
        model_type="gemma2",
        attention=attention(*BIASED),
        defaults={
            **_GEMMA3.defaults,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    _GEMMA3,
    Family(
        model_type="glm4",
        attention=attention("attention_bias"),
        mlp=FUSED_MLP,
        norms=(
            *("input_layernorm", "post_self_attn_layernorm"),
            *("post_attention_layernorm", "post_mlp_layernorm"),
        ),
        defaults={"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
        against_tensor=ONE_MATRIX,
        decides=("partial_rotary_factor",),
    ),
    Family(
        model_type="granite",
        attention=attention(*BIASED),
        mlp=gated("mlp", "inner", "mlp_bias"),
        scale=lambda keys: float(keys.get("attention_multiplier", 1.0)),
        logits=lambda keys: 1 / float(keys.get("logits_scaling", 1.0)),
        decides=("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    ),
    Family(
        model_type="phi3",
        attention=(
            *projections("self_attn.qkv_proj", rows="query+key+key", columns="hidden"),
            *projections("self_attn.o_proj", rows="hidden", columns="query"),
        ),
        mlp=FUSED_MLP,
        window=every_layer("sliding_window"),
        against_tensor=ONE_MATRIX,
        decides=("partial_rotary_factor", "original_max_position_embeddings"),
    ),
    Family(
        model_type="olmo2",
        attention=attention(*BIASED, *WHOLE_NORMS),
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        against_tensor=ONE_NORM,
    ),
    Family(
        model_type="qwen3_moe",
        against_tensor=BY_EXPERTS,
        attention=attention(*BIASED, *HEAD_NORMS),
        moe=EXPERTS,
        has_experts=_sparse_as_qwen,
        defaults={
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        decides=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers"),
        in_torch_engine=True,
    ),
    Family(
        model_type="olmoe",
        attention=attention(*BIASED, *WHOLE_NORMS),
        moe=EXPERTS,
        sizes={"expert_inner": "intermediate_size"},
        defaults={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        against_tensor=ONE_NORM,
        decides=("num_experts", "num_experts_per_tok", "norm_topk_prob", "clip_qkv"),
        routed_in_sglang=False,  # its layers do not tell the capturer which they are (0.5.20)
        in_torch_engine=True,
    ),
)
FAMILIES: dict[str, Family] = {record.model_type: record for record in _RECORDS}
"""By model_type, which is that of config.json; those with `refused` wait for what they say."""


def family_of(config: Mapping[str, Any]) -> Family:
    """Of the keys of a config.json. Raises KeyError: of none that is trained; the text says why."""
    kind = str(config.get("model_type"))
    family = FAMILIES.get(kind)
    if reason := family.refused if family else REFUSED.get(kind, "it has no record here"):
        trained = ", ".join(name for name, record in FAMILIES.items() if not record.refused)
        raise KeyError(f"is a {kind!r} model, which is not trained: {reason}; the learner trains {trained}")
    return FAMILIES[kind]


def adopt(path: str) -> Family:
    """Take the record `FAMILY` of a user's file, instead of ours for that model_type (model.family).

    Raises ValueError: there is no such file, or it is none with a record.
    """
    if not Path(path).is_file():
        raise ValueError(f"no file {path!r}; give one of Python with FAMILY = Family(...)")
    description = importlib.util.spec_from_file_location("family_of_the_user", path)
    if description is None or description.loader is None:
        raise ValueError(f"{path!r} is no file of Python")
    module = importlib.util.module_from_spec(description)
    try:
        description.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} fails: {type(error).__name__}: {error}") from error
    family = getattr(module, "FAMILY", None)
    if not isinstance(family, Family):
        raise ValueError(f"{path} has no FAMILY that is a slipstream.families.record.Family")
    FAMILIES[family.model_type] = family
    return family
