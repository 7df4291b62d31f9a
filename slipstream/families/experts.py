"""Experts of a model: which layers route, to how many of them, and how wide a token's routing is. No torch.

The routing of a token is [layers, k] expert ids: of each layer with experts, in order, the k that a pass has chosen.
Ids have one byte where a layer has at most 256 experts, else two: 384 bytes a token for Qwen3-30B-A3B (48 layers, 8 of
128 experts).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WITH_EXPERTS = ("qwen3_moe", "olmoe")


@dataclass(frozen=True, slots=True)
class Experts:
    """Mixtures of experts in a decoder."""

    layers: tuple[int, ...]
    """Numbers of the decoder layers that have them."""
    chosen: int
    """Of a token in each layer."""
    number: int
    """In each layer."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of ids."""
        return np.dtype("<u1" if self.number <= 256 else "<u2")

    @property
    def shape(self) -> tuple[int, int]:
        """[layers, k] of a token's routing."""
        return len(self.layers), self.chosen

    @property
    def token_bytes(self) -> int:
        """Of a token's routing."""
        return len(self.layers) * self.chosen * self.dtype.itemsize

    def told(self) -> str:
        """For peers, which agree on it: layers, chosen and number."""
        return f"{','.join(map(str, self.layers))}/{self.chosen}/{self.number}"

    @classmethod
    def of_told(cls, told: str) -> "Experts | None":
        """Of `told`; None of an empty one."""
        if not told:
            return None
        layers, chosen, number = told.split("/")
        return cls(tuple(map(int, layers.split(","))), int(chosen), int(number))

    def rows(self, data: NDArray[np.uint8]) -> NDArray[Any]:
        """[tokens, layers, k] ids of the bytes of several tokens."""
        return data.view(self.dtype).reshape(-1, *self.shape)


def experts_of(model: Mapping[str, Any]) -> Experts | None:
    """Of the keys of a decoder's config.json; None where no layer has experts."""
    if model.get("model_type") not in WITH_EXPERTS:
        return None
    number = int(model.get("num_experts") or model.get("num_local_experts") or 0)
    step, dense = int(model.get("decoder_sparse_step") or 1), set(model.get("mlp_only_layers") or ())
    layers = tuple(i for i in range(int(model["num_hidden_layers"])) if i not in dense and (i + 1) % step == 0)
    return Experts(layers, int(model["num_experts_per_tok"]), number) if number and layers else None
