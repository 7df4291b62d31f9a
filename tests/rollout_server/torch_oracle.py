"""Tiny random model folders, and what transformers says about them: the oracle of the engines' tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollout_server.engines.base import Completion

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "olmoe": OlmoeConfig,
}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SCALED = {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3_ROPE = {**SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN_ROPE = {**SCALED, "rope_type": "yarn"}
WIDE_HEADS = {"tie_word_embeddings": False, "attention_bias": True, "head_dim": 16}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"family": "qwen3"},
    "qwen3-untied-bias-wide-heads": {"family": "qwen3", **WIDE_HEADS},
    "qwen2-untied": {"family": "qwen2", "tie_word_embeddings": False},
    "qwen2-tied-linear-rope": {"family": "qwen2", "rope_parameters": LINEAR_ROPE},
    "llama-untied-llama3-rope": {"family": "llama", "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
    "llama-tied-all-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen3-moe": {"family": "qwen3_moe", **MIXTURE, "norm_topk_prob": True},
    "qwen3-moe-some-dense": {"family": "qwen3_moe", **MIXTURE, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "olmoe-untied": {"family": "olmoe", **MIXTURE, "tie_word_embeddings": False},
    "llama-no-gqa-yarn": {"family": "llama", "num_key_value_heads": 4, "rope_parameters": YARN_ROPE},
}


def make_model(family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Any:
    """A random model of the family, in float32, with logits that are far from uniform."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**{**SIZES, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # No two norms alike, no bias zero: a mistake anywhere shows in the logits.
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model.eval()


def save_folder(folder: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """Write `make_model` as a Hugging Face folder."""
    make_model(family, seed=seed, **changes).save_pretrained(folder)
    return folder


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The folder as transformers reads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def hf_tensors(model: Any) -> dict[str, torch.Tensor]:
    """What an update of this model carries: HF names, a tied lm_head left out."""
    tied, found = model.config.tie_word_embeddings, dict[str, torch.Tensor]()
    for name, tensor in model.state_dict().items():
        stem, is_fused, part = name.rpartition(".experts.")
        if is_fused:  # hub files have experts one by one
            parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[part]
            for expert, whole in enumerate(tensor):
                each = zip(parts, whole.chunk(len(parts)), strict=True)
                found |= {f"{stem}.experts.{expert}.{one}.weight": block.clone() for one, block in each}
        elif not (tied and name == "lm_head.weight"):
            found[name] = tensor.clone()
    return found


@torch.inference_mode()
def logprobs_of(model: Any, prompt: list[int], answer: Completion, *, temperature: float = 1.0) -> torch.Tensor:
    """float32 logprobs [L] of the answer's tokens from one whole forward."""
    ids = torch.tensor([prompt + answer.token_ids.tolist()])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


@torch.inference_mode()
def logprobs_over_kept_kv(old: Any, new: Any, prompt: list[int], answer: Completion, first_new: int) -> torch.Tensor:
    """Logprobs of answer[first_new:] under `new`, reading KV that `old` made of everything it was fed before."""
    ids = torch.tensor([prompt + answer.token_ids.tolist()])
    fed_to_old = len(prompt) + first_new - 1
    cache = old(ids[:, :fed_to_old], past_key_values=DynamicCache(config=old.config), use_cache=True).past_key_values
    logits = new(ids[:, fed_to_old:-1], past_key_values=cache).logits[0].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, fed_to_old + 1 :, None])[:, 0]


def check_versions(models: Mapping[int, Any], prompt: list[int], answer: Completion) -> None:
    """Every token's logprob is what the weights of its version say of it, with all before it read by them."""
    expected = {version: logprobs_of(model, prompt, answer) for version, model in models.items()}
    of_each = torch.stack([expected[version][place] for place, version in enumerate(answer.versions.tolist())])
    assert error(answer, of_each) <= 1e-5


def error(answer: Completion, expected: torch.Tensor, span: slice = slice(None)) -> float:
    """Largest absolute difference between the engine's logprobs and the expected ones."""
    got = torch.from_numpy(answer.logprobs)[span]
    assert got.shape == expected.shape
    return float((got - expected).abs().max())
