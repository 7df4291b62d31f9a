"""Names of LoRA adapters on the bus (peft's), and the digest of their scale.

An update then carries adapters only. The weights that they are added to, and the factor of what they add, must be on
both ends already: the manifest has their digests (`Layout.kept`), and an engine that holds others is quarantined.
"""

from collections.abc import Iterable

import torch

from weight_bus.digest import slice_digest

PREFIX = "base_model.model."
SCALE = "lora_scale"
"""Stands in a manifest for alpha / rank."""


def names_of(weight: str) -> tuple[str, str]:
    """Names of A and B of a projection, from the name of its weight.

    Example: "model.layers.0.mlp.up_proj.weight" has "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight".
    """
    module = f"{PREFIX}{weight.removesuffix('.weight')}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def is_adapted(name: str, projections: Iterable[str]) -> bool:
    """Whether this is the weight of one of the projections; experts have no adapters."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and ".experts." not in name and module.rpartition(".")[2] in projections


def scale_digest(scale: float) -> int:
    """Digest of alpha / rank."""
    return slice_digest(torch.tensor([scale], dtype=torch.float64))
