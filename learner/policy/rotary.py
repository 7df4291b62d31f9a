"""Rotary positions of three axes: what makes a Qwen2 decoder that of Qwen2-VL and Qwen2.5-VL.

All else of those decoders is a Qwen2, under the same names: so it is built, sharded and published as one.
"""

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding


class MultimodalRotary(Qwen2RotaryEmbedding):  # type: ignore[misc]
    """Cosines and sines for positions [1, T] of text, or [3, 1, T] of time, row and column (M-RoPE, 2409.12191)."""

    def __init__(self, config: Any, device: Any = None) -> None:
        super().__init__(config, device)
        sections = list(config.rope_parameters["mrope_section"])
        # pair i of a head turns by one axis; its halves lie half a head apart
        self.axes = [axis for axis, size in enumerate(sections) for _ in range(size)] * 2

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, D] each."""
        if position_ids.dim() == 2:
            return super().forward(x, position_ids)  # type: ignore[no-any-return]
        columns = torch.arange(len(self.axes), device=position_ids.device)
        axes = torch.tensor(self.axes, device=position_ids.device)
        cos, sin = super().forward(x, position_ids[:, 0])
        return cos[axes, :, columns].T[None], sin[axes, :, columns].T[None]


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether a decoder's positions have three axes."""
    return "mrope_section" in (getattr(config, "rope_parameters", None) or {})
