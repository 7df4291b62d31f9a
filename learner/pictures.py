"""Pictures of a batch on their way into rows: decoded once a rank and batch, features made in the forward."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.prefixes import Layout, offsets
from replay.messages import Batch
from slipstream.families.pictures import Grid, PictureError, Vision, decode, unpacked, vision_of
from slipstream.runtime.fingerprint import read_json
from slipstream.vision import Pixels, VisionTower


@dataclass(frozen=True, slots=True)
class RowPictures:
    """Pictures of a row's prompts, each once, and where their tokens stand in the row."""

    pixels: tuple[Tensor, ...]
    """[patches, values] float32 of each, in host memory; the rows of a batch share them."""
    grids: tuple[Grid, ...]
    places: Tensor
    """[k] int64, positions of the row that are tokens of pictures."""
    sources: Tensor
    """[k] int64, which of the features of all pictures each of them is."""
    features: Tensor | None = None
    """[tokens of all pictures, hidden], once the tower has looked."""

    def to(self, device: torch.device) -> "RowPictures":
        """The same on a device, but for the pixels: the tower fetches one picture at a time."""
        places, sources = (tensor.to(device, non_blocking=True) for tensor in (self.places, self.sources))
        return replace(self, places=places, sources=sources)

    def seen_by(self, tower: VisionTower) -> "RowPictures":
        """With features."""
        return replace(self, features=tower.features(self.pixels, self.grids))

    def over(self, embedded: Tensor) -> Tensor:
        """Embeddings [total, hidden] with the features in place of the tokens of pictures."""
        assert self.features is not None
        return embedded.index_copy(0, self.places, self.features[self.sources].to(embedded.dtype))


@dataclass(frozen=True, slots=True)
class Shown:
    """Pictures of one rank's part of a batch, decoded."""

    vision: Vision
    pixels: list[NDArray[np.float32]]
    grids: list[Grid]
    references: list[str]
    numbers: list[range]
    """[samples of this rank] pictures of each sample's prompt."""

    def names(self, members: Sequence[int]) -> list[bytes]:
        """What names the pictures of each sample's prompt."""
        return ["\n".join(self.references[i] for i in self.numbers[member]).encode() for member in members]

    def laid(self, batch: Batch, members: Sequence[int], row: Layout) -> tuple[Tensor, RowPictures | None]:
        """Rotary positions [3, 1, total] of a row, and its pictures; [1, total] and None where it has none."""
        wanted = sorted({number for member in members for number in self.numbers[member]})
        if not wanted:
            return torch.from_numpy(row.positions)[None], None
        first = dict(zip(wanted, offsets([self.vision.tokens(self.grids[i]) for i in wanted]).tolist(), strict=False))
        starts = offsets(batch.prompt_lengths + batch.lengths)
        positions = np.empty((3, len(row.ids)), np.int64)
        places, sources = [], []
        for owner, member in enumerate(members):
            own = np.flatnonzero(row.owners == owner)
            prompt = batch.token_ids[starts[member] :][: batch.prompt_lengths[member]]
            total, numbers = int(batch.prompt_lengths[member] + batch.lengths[member]), self.numbers[member]
            grids = [self.grids[i] for i in numbers]
            at = row.positions[own]
            positions[:, own] = self.vision.positions(prompt, grids, total)[:, at]
            features = np.full(total, -1)
            of_pictures = [np.arange(self.vision.tokens(self.grids[i])) + first[i] for i in numbers]
            features[self.vision.places(prompt, grids)] = np.concatenate([np.zeros(0, np.int64), *of_pictures])
            shown = features[at] >= 0
            places.append(own[shown])
            sources.append(features[at][shown])
        pictures = RowPictures(
            pixels=tuple(torch.from_numpy(self.pixels[i]) for i in wanted),
            grids=tuple(self.grids[i] for i in wanted),
            places=torch.from_numpy(np.concatenate(places)),
            sources=torch.from_numpy(np.concatenate(sources)),
        )
        return torch.from_numpy(positions)[:, None], pictures


class PictureDecoder:
    """Decodes the pictures of batches for one model."""

    def __init__(self, folder: Path, vision: Vision) -> None:
        self._vision, self._pixels = vision, Pixels(folder)

    @classmethod
    def of(cls, folder: Path) -> "PictureDecoder | None":
        """None for a model that takes no pictures."""
        vision = vision_of(read_json(folder / "config.json"))
        return None if vision is None else cls(folder, vision)

    def look(self, batch: Batch) -> Shown | None:
        """The pictures of this rank's part; None without any.

        Raises PictureError: one is not there, is not what the answers were sampled for, or is no picture.
        """
        if not batch.picture_counts.size:
            return None
        try:
            pictures = unpacked(batch.pictures, batch.picture_bytes)
            found = [self._pixels.of(decode(picture)) for picture in pictures]
        except ValueError as error:
            raise PictureError(f"batch {batch.step}, rank {batch.rank}: {error}") from error
        return Shown(
            vision=self._vision,
            pixels=[pixels for pixels, _ in found],
            grids=[grid for _, grid in found],
            references=batch.pictures,
            numbers=self._numbers(batch),
        )

    def _numbers(self, batch: Batch) -> list[range]:
        """[samples] pictures of each: its group's, unless its prompt shows none (an episode may have such samples)."""
        ends, starts = offsets(batch.picture_counts).tolist(), offsets(batch.prompt_lengths + batch.lengths)
        groups = batch.all_groups[batch.trajectory].tolist()
        prompts = (batch.token_ids[start:][:size] for start, size in zip(starts, batch.prompt_lengths, strict=False))
        return [
            range(ends[group], ends[group + 1] if self._vision.is_shown(prompt) else ends[group])
            for group, prompt in zip(groups, prompts, strict=True)
        ]
