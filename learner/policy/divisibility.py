"""Divisibility of a model by learner.mesh. Pure, no torch, for the dry run."""

from collections.abc import Mapping
from typing import Any

from configs.learner import Mesh


def problem_with(mesh: Mesh, model: Mapping[str, Any]) -> str:
    """What the mesh does not divide, and a value that works; else empty.

    Args:
        mesh: learner.mesh.
        model: the keys of config.json.
    """
    if mesh.tensor == 1:
        return ""
    heads = int(model["num_attention_heads"])
    key_value = int(model.get("num_key_value_heads") or heads)
    parts = {
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        "intermediate_size": int(model["intermediate_size"]),
        "vocab_size": int(model["vocab_size"]),
    }
    uneven = {name: size for name, size in parts.items() if size % mesh.tensor}
    if uneven:
        works = next(n for n in range(mesh.tensor, 0, -1) if all(size % n == 0 for size in parts.values()))
        found = " and ".join(f"{name} {size}" for name, size in uneven.items())
        return f"learner.mesh.tensor: {mesh.tensor} does not divide {found} of the model; take {works}"
    return ""
