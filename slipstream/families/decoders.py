"""Decoders that are trained, and what their config.json may leave out. Both ends ask here; no torch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

FAMILIES: Mapping[str, Mapping[str, int]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""By model_type: what transformers takes for a key that is left out, where that does not follow from the others."""


class Heads(NamedTuple):
    """Of attention."""

    query: int
    key_value: int
    size: int


def heads_of(model: Mapping[str, Any]) -> Heads:
    """Of the keys of a decoder's config.json."""
    known = {**FAMILIES.get(model.get("model_type", ""), {}), **model}
    query = int(known["num_attention_heads"])
    size = known.get("head_dim") or known["hidden_size"] // query
    return Heads(query, int(known.get("num_key_value_heads") or query), int(size))
