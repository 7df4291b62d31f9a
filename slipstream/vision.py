"""The frozen vision tower of a model, which both ends read from its folder, and pictures as it takes them.

It is frozen: features of a picture are the same in every version, and the bus has the decoder's tensors alone. That
both ends hold the same tower is checked at Hello, by a hash of its tensors (slipstream/runtime/fingerprint.py).
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from configs.errors import SlipstreamError
from slipstream.families.pictures import Grid
from slipstream.families.record import TOWER
from slipstream.families.table import FAMILIES
from slipstream.weight_files import weight_files

if TYPE_CHECKING:
    from PIL.Image import Image


class VisionError(SlipstreamError, ValueError, code="SLIP-MODEL-03"):
    """A folder has no vision tower or image processor that can be used."""


class Pixels:
    """From pictures to what the tower reads, by the image processor of the folder: on a CPU, alike on both ends.

    Raises VisionError.
    """

    def __init__(self, folder: Path) -> None:
        # that on NumPy and Pillow: resizing by another library gives other pixels
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        try:
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            raise VisionError(
                f"model.path: {folder}/preprocessor_config.json is not readable: {error}; copy the model folder again"
            ) from error

    def of(self, image: "Image") -> tuple[NDArray[np.float32], Grid]:
        """[patches, values of a patch] and how they lie. Raises ValueError: a side is over 200 times the other."""
        found = self._processor(images=[image], return_tensors="np")
        frames, rows, columns = found["image_grid_thw"][0].tolist()
        return np.ascontiguousarray(found["pixel_values"], np.float32), (frames, rows, columns)


class VisionTower:
    """The frozen tower, whole in memory. Raises VisionError: the folder lacks a tensor, or has another shape."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        module, name = FAMILIES[config.model_type].tower
        kind: Any = getattr(importlib.import_module(module), name)
        self._tower = kind._from_config(config.vision_config, dtype=dtype)
        given = {name.removeprefix(TOWER): tensor for name, tensor in read_tower(folder)}
        try:
            self._tower.load_state_dict(given)
        except RuntimeError as error:
            raise VisionError(f"model.path: {folder}: {TOWER}*: {error}") from error
        self._tower.requires_grad_(False).eval().to(device)
        self.dtype, self.device = dtype, torch.device(device)

    @property
    def num_bytes(self) -> int:
        """Memory of its weights."""
        return sum(parameter.nbytes for parameter in self._tower.parameters())

    @torch.no_grad()
    def features(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> torch.Tensor:
        """[tokens of all pictures, hidden] of [patches, values] each; one picture at a time, which bounds memory."""
        found = []
        for one, grid in zip(pixels, grids, strict=True):
            shape = torch.tensor([grid], device=self.device)
            found.append(self._tower(one.to(self.device, self.dtype), grid_thw=shape).pooler_output)
        return torch.cat(found)


def read_tower(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """The tower's tensors by name, as they are stored."""
    found = []
    files = weight_files(folder, VisionError)
    for file in sorted({path for name, path in files.items() if name.startswith(TOWER)}):
        with safe_open(str(file), framework="pt") as opened:
            found += [(name, opened.get_tensor(name)) for name in opened.keys() if name.startswith(TOWER)]  # noqa: SIM118
    return found
