"""Prompts with pictures: pictures read and decoded, and their tokens written out in the prompt."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configs.errors import SlipstreamError
from rollout_server.engines.base import Pictures
from slipstream.families.pictures import Picture, PictureError, Vision, decode, opened, vision_of
from slipstream.runtime.fingerprint import read_json
from slipstream.vision import Pixels


class TaskError(SlipstreamError, ValueError, code="SLIP-TASK-01"):
    """A prompt or the model folder's tokenizer cannot be used."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sampled from."""

    token_ids: list[int]
    pictures: Pictures | None = None
    """For the engine."""
    sources: tuple[Picture, ...] = ()
    """The same, for the learner."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Pictures of a row, decoded: what its prompts need."""

    vision: Vision
    pictures: Pictures
    sources: tuple[Picture, ...]

    def expand(self, token_ids: Sequence[int]) -> list[int]:
        """Each picture's one token as many as it has. Raises TaskError: not one token for each picture."""
        try:
            return self.vision.expand(token_ids, self.pictures.grids)
        except PictureError as error:
            raise TaskError(str(error)) from error

    def shown_in(self, token_ids: Sequence[int]) -> Pictures | None:
        """For the engine: what a context of an episode shows, all pictures or none. Raises TaskError: some of them."""
        context = np.asarray(token_ids, np.int32)
        if not self.vision.is_shown(context):
            return None
        try:
            self.vision.positions(context, self.pictures.grids, context.size)
        except PictureError as error:
            raise TaskError(f"{error}; a context shows all pictures of its row, in their order, or none") from error
        return self.pictures


class PictureProcessor:
    """Reads pictures as one model's vision tower takes them."""

    def __init__(self, path: str) -> None:
        folder = Path(path)
        config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        self._folder, self._model_type = folder, config.get("model_type")
        self._vision: Vision | None = vision_of(config)

    @functools.cached_property
    def _pixels(self) -> Pixels:
        return Pixels(self._folder)

    def look(self, images: Sequence[str | bytes]) -> Seen:
        """Read and decode pictures of a row. Raises TaskError: one cannot be used."""
        if self._vision is None:
            raise TaskError(
                f"the row has {len(images)} pictures, and model.path {str(self._folder)!r} is a {self._model_type!r}"
                " model, which takes none; take one of the Qwen2-VL family, or drop the column"
            )
        try:
            sources = tuple(opened(image) for image in images)
            found = [self._pixels.of(decode(picture)) for picture in sources]
        except ValueError as error:
            raise TaskError(str(error)) from error
        grids = tuple(grid for _, grid in found)
        return Seen(self._vision, Pictures(np.concatenate([pixels for pixels, _ in found]), grids), sources)
