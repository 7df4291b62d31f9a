"""What a forward leaves in memory, counted from a model's sizes. Pure, no torch.

Activations of a decoder layer are counted in elements of the compute dtype, per token:

    none       every product, and queries and keys as attention sees them       (times EAGER without learner.compile)
    selective  outputs of products and attention; of a layer with a mixture, what is none's and not the mixture's
    full       the layer's input, and one layer at a time as with none

A mixture of experts has hidden states of each choice besides: the compiler makes them again, else they are kept once.
The layer in work has them twice, and what lies inside of the experts once more; without the compiler three and four
times. Where ranks divide experts they are kept in any case, and the layer in work has them twelve times (sent,
received, sorted, and gradients of each), and what lies inside eight times: counted on a CPU.

Keys and values that are copied for a shared prompt count in learner.max_tokens_per_microbatch, by an eighth of a token
for a position (replay/batches/sharing.py): so a token counts at least eight copies.
"""

from collections.abc import Mapping
from typing import Any, Literal

from replay.batches.sharing import COPIES_PER_TOKEN
from slipstream.families.pictures import decoder_of
from slipstream.families.sizes import Sizes

Recompute = Literal["none", "selective", "full"]
EAGER = 2.3
"""Activations without the compiler, over those with it: norms and gates are not kept, but made again where they are
read (learner/policy/layers.py)."""


def activation_bytes(
    sizes: Sizes, recompute: Recompute, *, compiled: bool, element_bytes: int, divided: bool = False
) -> int:
    """Per token of a microbatch, over all layers; `divided`: experts, among ranks."""
    s = sizes
    products = s.query + s.key_value + s.query + s.hidden + 2 * s.intermediate + s.hidden
    choices = 0 if compiled and not divided else s.routed
    kept, of_mixture = products + choices + 1.1 * (s.query + s.key_value / 2), 2 * s.intermediate + choices
    more = 1 if compiled else EAGER
    everything = int(kept * more)
    everything = max(everything, COPIES_PER_TOKEN * s.key_value)  # where a row is mostly copies of prompts
    in_work = 0
    if s.routed:
        hidden, inside = (12, 8) if divided else (2, 1) if compiled else (3, 4)
        in_work = hidden * s.routed + inside * s.intermediate
    per_token = {
        "none": s.layers * everything,
        "selective": s.layers * (int((kept - of_mixture) * more) if s.routed else products) + everything,
        "full": s.layers * s.hidden + everything,
    }[recompute]
    return element_bytes * (per_token + in_work)


def tower_bytes(model: Mapping[str, Any], element_bytes: int, tokens: int) -> int:
    """Of the vision tower in a config.json, whole on each rank, and its forward over a picture of so many tokens.

    Nothing is kept for a backward: a layer's widest results are there at once.
    """
    tower = model.get("vision_config")
    if not isinstance(tower, Mapping):
        return 0
    width = int(tower.get("embed_dim") or tower.get("hidden_size") or 1280)
    inner = int(tower.get("intermediate_size") or width * tower.get("mlp_ratio", 4))
    merge, patch = int(tower.get("spatial_merge_size", 2)), int(tower.get("patch_size", 14))
    values = 3 * int(tower.get("temporal_patch_size", 2)) * patch**2
    merged = width * merge**2
    layers = int(tower.get("depth", 32)) * width * (4 * width + 3 * inner)
    weights = layers + width * values + merged * (merged + int(decoder_of(model)["hidden_size"]))
    return element_bytes * (weights + tokens * merge**2 * (8 * width + 3 * inner)) + 4 * tokens * merge**2 * values
