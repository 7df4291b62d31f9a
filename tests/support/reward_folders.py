"""Reward models for tests: tiny random decoders with one label, and what transformers itself says of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
"""Of the quick start's tokenizer: 0 is <pad>, 1 is <eos>."""
CHAT = "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>{% endfor %}"


def save_reward_model(folder: Path, family: str = "qwen2", *, chat_template: str | None = None, **changes: Any) -> Path:
    """Write a folder, with the quick start's tokenizer of one token a character; `changes` are of its config.json."""
    import torch
    from transformers import AutoModelForSequenceClassification, LlamaConfig, Qwen2Config

    from learner.examples.sort6 import save_tokenizer

    torch.manual_seed(len(family))
    settings = {"num_labels": 1, **SIZES, **changes}
    config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[family](**settings)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)  # or all scores would be about equal
    model.save_pretrained(folder)
    save_tokenizer(folder)
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def alone(folder: Path, rows: Sequence[Sequence[int]]) -> list[float]:
    """Scores of token ids by transformers' own forward, one row at a time, without padding or mask."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([list(row)])).logits.item() for row in rows]
