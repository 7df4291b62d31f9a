"""Pictures in the torch engine: the frozen vision tower beside the weights that updates change."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_server.engines.base import EngineError, Pictures
from rollout_server.engines.torch.rows import Look
from slipstream.families.pictures import PictureError, Vision
from slipstream.vision import VisionError, VisionTower


class Viewer:
    """Looks at the pictures of a prompt, once for all its answers. Raises EngineError where the folder lacks the tower.

    No update changes the tower, so what was seen under one version holds under all.
    """

    def __init__(self, folder: Path, vision: Vision, dtype: torch.dtype) -> None:
        try:
            self._tower = VisionTower(folder, dtype)
        except VisionError as error:
            raise EngineError(str(error)) from error
        self._vision = vision

    def look(self, prompt: NDArray[np.int32], pictures: Pictures) -> Look:
        """Raises EngineError: the prompt has not the tokens of these pictures."""
        try:
            places = self._vision.places(prompt, pictures.grids)
            positions = self._vision.positions(prompt, pictures.grids, len(prompt) + 1)
        except PictureError as error:
            raise EngineError(str(error)) from error
        patches = [frames * rows * columns for frames, rows, columns in pictures.grids]
        pixels = torch.split(torch.from_numpy(pictures.pixels), patches)
        features = self._tower.features(pixels, pictures.grids)
        return Look(features, places, positions[:, :-1], shift=int(positions[0, -1]) - len(prompt))
