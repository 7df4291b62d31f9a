"""Routing of a token: which experts each decoder layer has sent it to, and how many bytes that takes. No torch.

It is [layers, k] expert ids, zeros for a layer without experts. Ids have one byte where a layer has at most 256
experts, else two: 384 bytes a token for Qwen3-30B-A3B (48 layers, 8 of 128 experts).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.families.sizes import Sizes
from slipstream.families.table import FAMILIES


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a model's layers."""

    layers: int
    """Decoder layers, those without experts included."""
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
        return self.layers, self.chosen

    @property
    def token_bytes(self) -> int:
        """Of a token's routing."""
        return self.layers * self.chosen * self.dtype.itemsize

    def told(self) -> str:
        """For peers, which agree on it: layers, chosen and number."""
        return f"{self.layers}/{self.chosen}/{self.number}"

    @classmethod
    def of_told(cls, told: str) -> "Experts | None":
        """Of `told`; None of an empty one."""
        return cls(*map(int, told.split("/"))) if told else None

    def rows(self, data: NDArray[np.uint8]) -> NDArray[Any]:
        """[tokens, layers, k] ids of the bytes of several tokens."""
        return data.view(self.dtype).reshape(-1, *self.shape)


def experts_of(model: Mapping[str, Any]) -> Experts | None:
    """Of the keys of a decoder's config.json; None where no layer has experts."""
    if (family := FAMILIES.get(model.get("model_type", ""))) is None or not family.moe:
        return None
    sizes = Sizes.of(model)
    return Experts(sizes.layers, sizes.experts_per_token, sizes.dims["experts"]) if any(sizes.has_experts) else None
