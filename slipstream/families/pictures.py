"""Pictures of prompts: what of them travels, and where their tokens stand. Both ends ask here; no torch.

Encoded bytes or the path of a file travel, never pixels, which are many times larger: they are decoded where they are
used. A digest says that both ends have decoded the same picture.
"""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import SlipstreamError
from slipstream.families.table import FAMILIES

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 64 * 1024**2
"""Of a picture before it is made smaller; a few bytes can announce a picture that fills all memory."""
MAX_FILE_BYTES = 256 * 1024**2
MAX_RATIO = 200
Grid = tuple[int, int, int]
"""Patches of a picture: frames (one), rows, columns."""


class PictureError(SlipstreamError, ValueError, code="SLIP-DATA-04"):
    """A picture cannot be used; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One encoded picture. It travels by its path where it has one, else as its bytes."""

    digest: str
    """blake2b of the bytes, 32 hexadecimal digits."""
    path: str
    data: bytes

    @property
    def reference(self) -> str:
        """What messages say of it: `digest:size:path`."""
        return f"{self.digest}:{len(self.data)}:{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """What of a model's config.json decides where pictures stand among tokens."""

    image_token: int
    video_token: int
    merge: int
    """Patches along each side of what becomes one token."""

    def tokens(self, grid: Grid) -> int:
        """Of one picture."""
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def expand(self, token_ids: Sequence[int], grids: Sequence[Grid]) -> list[int]:
        """Token ids in which each picture's one token has become as many as it has.

        Raises PictureError: not as many tokens of pictures as pictures; one may stand in the text.
        """
        found = sum(token == self.image_token for token in token_ids)
        if found != len(grids) or self.video_token in token_ids:
            raise PictureError(
                f"the rendered prompt has {found} tokens of pictures (id {self.image_token}) for {len(grids)} pictures;"
                " the chat template must write one for each, and text must not hold them"
            )
        left = iter(grids)
        expanded: list[int] = []
        for token in token_ids:
            expanded += [token] * (self.tokens(next(left)) if token == self.image_token else 1)
        return expanded

    def is_shown(self, prompt: NDArray[Any]) -> bool:
        """Whether a prompt shows pictures: one of an episode may show none of its row's."""
        return bool((prompt == self.image_token).any())

    def places(self, prompt: NDArray[Any], grids: Sequence[Grid]) -> NDArray[np.int64]:
        """Positions in the prompt at which features of the pictures stand, in order. Raises PictureError: too few.

        Tokens of pictures behind those are text: a policy may have sampled them earlier.
        """
        places = np.flatnonzero(prompt == self.image_token)
        if len(places) < (wanted := sum(map(self.tokens, grids))):
            raise PictureError(f"{len(places)} tokens of pictures in a prompt whose pictures have {wanted}")
        return places[:wanted]

    def spans(self, prompt: NDArray[Any], grids: Sequence[Grid]) -> list[tuple[int, int]]:
        """Position of the first and the last token of each picture. Raises PictureError."""
        ends = np.cumsum([self.tokens(grid) for grid in grids])
        places = self.places(prompt, grids)
        return [
            (int(places[end - self.tokens(grid)]), int(places[end - 1])) for end, grid in zip(ends, grids, strict=True)
        ]

    def positions(self, prompt: NDArray[Any], grids: Sequence[Grid], total: int) -> NDArray[np.int64]:
        """[3, total] rotary positions of time, row and column; the answer's go on after the prompt's.

        Text counts on all three axes. A picture of r rows and c columns of tokens that begins at position p has time p,
        rows p to p + r - 1 and columns p to p + c - 1; text after it begins at p + max(r, c) (M-RoPE, Wang et al. 2024,
        2409.12191). What a policy samples is text, whatever its ids.
        """
        found, token, position = np.empty((3, total), np.int64), 0, 0
        for (first, last), (frames, rows, columns) in zip(self.spans(prompt, grids), grids, strict=True):
            found[:, token:first] = position + np.arange(first - token)
            rows, columns = rows // self.merge, columns // self.merge
            axes = np.indices((frames, rows, columns)).reshape(3, -1)
            if last - first + 1 != axes.shape[1]:
                raise PictureError(f"the tokens of a picture of {axes.shape[1]} tokens do not follow each other")
            found[:, first : last + 1] = axes + position + first - token
            token, position = last + 1, position + first - token + max(rows, columns)
        found[:, token:] = position + np.arange(total - token)
        return found


def vision_of(config: Mapping[str, Any]) -> Vision | None:
    """Of a config.json; None of a model that takes no pictures."""
    if not _has_tower(config):
        return None
    tower = config.get("vision_config") or {}
    return Vision(
        image_token=int(config.get("image_token_id", 151655)),
        video_token=int(config.get("video_token_id", 151656)),
        merge=int(tower.get("spatial_merge_size", 2)),
    )


def decoder_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of the decoder in a model that takes pictures: a Qwen2, with the tower's `vision_config` beside it.

    That of other models comes back as it is. Keys of a decoder stand at the top or in `text_config`, where transformers
    5 writes them.
    """
    if not _has_tower(config):
        return dict(config)
    own = {key: value for key, value in config.items() if key != "text_config"}
    text = {key: value for key, value in (config.get("text_config") or {}).items() if key != "tie_word_embeddings"}
    rope = text.get("rope_parameters") or own.get("rope_parameters") or own.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or text.get("rope_theta") or own.get("rope_theta") or 1_000_000.0
    merged = {**own, **text, "model_type": FAMILIES[config["model_type"]].text, "architectures": ["Qwen2ForCausalLM"]}
    merged.pop("rope_scaling", None)
    kept = {key: value for key, value in rope.items() if key not in ("type", "rope_type")}
    kind = rope.get("rope_type", rope.get("type", "default"))
    merged["rope_parameters"] = {**kept, "rope_type": "default" if kind == "mrope" else kind, "rope_theta": theta}
    return merged


def _has_tower(config: Mapping[str, Any]) -> bool:
    family = FAMILIES.get(config.get("model_type", ""))
    return family is not None and bool(family.text)


def opened(source: str | bytes) -> Picture:
    """A picture of a row, which holds its bytes or the path of a file. Raises PictureError."""
    path = source if isinstance(source, str) else ""
    data = _read(path) if isinstance(source, str) else source
    return Picture(digest_of(data), path, data)


def digest_of(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _read(path: str) -> bytes:
    try:
        if (size := Path(path).stat().st_size) > MAX_FILE_BYTES:
            raise PictureError(f"picture {path}: {size} bytes, at most {MAX_FILE_BYTES} are read")
        return Path(path).read_bytes()
    except OSError as error:
        raise PictureError(
            f"picture {path}: {error.strerror}; pictures that are files must lie under the same path on every node"
        ) from error


def decode(picture: Picture) -> "Image":
    """Its pixels, RGB. Raises PictureError: Pillow is missing, it is no picture, or too large."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise PictureError("pictures need Pillow; install the extra: pip install 'slipstream-rl[images]'") from error
    name = f"picture {picture.path or picture.digest}"
    try:
        with Image.open(io.BytesIO(picture.data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise PictureError(f"{name}: {image.width} x {image.height} pixels, at most {MAX_PIXELS} are decoded")
            return image.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        if isinstance(error, PictureError):
            raise
        raise PictureError(f"{name}: not a readable picture ({', '.join(FORMATS)}): {error}") from error


def grid_of(width: int, height: int, processor: Mapping[str, Any]) -> Grid:
    """Patches of a picture of so many pixels, by a preprocessor_config.json.

    Sides become multiples of a token's, and pixels at most `longest_edge` and at least `shortest_edge` (Qwen2-VL, Wang
    et al. 2024, 2409.12191, section 2.1). Raises PictureError: a side is over 200 times the other.
    """
    if max(width, height) > MAX_RATIO * min(width, height):
        raise PictureError(f"a picture of {width} x {height} pixels; no side may be over {MAX_RATIO} times the other")
    size = processor.get("size") or {}
    least = int(processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
    most = int(processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
    patch, merge = int(processor.get("patch_size", 14)), int(processor.get("merge_size", 2))
    unit = patch * merge
    sides = [round(side / unit) * unit for side in (height, width)]
    if sides[0] * sides[1] > most:
        scale = math.sqrt(height * width / most)
        sides = [max(unit, math.floor(side / scale / unit) * unit) for side in (height, width)]
    elif sides[0] * sides[1] < least:
        scale = math.sqrt(least / (height * width))
        sides = [math.ceil(side * scale / unit) * unit for side in (height, width)]
    return 1, sides[0] // patch, sides[1] // patch


def pixel_bytes(grid: Grid, processor: Mapping[str, Any]) -> int:
    """Of what a vision tower reads of one picture, float32."""
    values = 3 * int(processor.get("temporal_patch_size", 2)) * int(processor.get("patch_size", 14)) ** 2
    return 4 * values * math.prod(grid)


def packed(pictures: Sequence[Picture]) -> dict[str, Any]:
    """Fields of Group for these pictures: references, and the bytes of those without a path."""
    data = b"".join(picture.data for picture in pictures if not picture.path)
    return {
        "pictures": [picture.reference for picture in pictures],
        "picture_bytes": np.frombuffer(data, np.uint8),
    }


def unpacked(references: Sequence[str], data: NDArray[np.uint8]) -> list[Picture]:
    """Pictures of a message, files read. Raises PictureError: a file is missing, or was changed since."""
    found = []
    for reference, given in zip(references, _given(references, data), strict=True):
        path = reference.split(":", 2)[2]
        picture = opened(path or given)
        if picture.reference != reference:
            raise PictureError(
                f"picture {path or reference}: its bytes are not those that the answers were sampled for"
            )
        found.append(picture)
    return found


def _given(references: Sequence[str], data: NDArray[np.uint8]) -> list[bytes]:
    """The bytes that came for each picture; none for a file. Raises PictureError: not as many as the references say."""
    found, first = [], 0
    for reference in references:
        _, size, path = ([*reference.split(":", 2), "", "", ""])[:3]
        if not size.isdecimal():
            raise PictureError(f"a picture is referred to as {reference[:80]!r}, expected digest:size:path")
        here = 0 if path else int(size)
        found.append(data[first : first + here].tobytes())
        first += here
    if first != data.size:
        raise PictureError(f"{data.size} bytes of pictures, the references say {first}")
    return found


def problem_with(references: Sequence[str], data: NDArray[np.uint8], row: Mapping[str, Any]) -> str | None:
    """What is wrong with the pictures of a group for the row of its lease, or None. Files are not read."""
    wanted = row.get("images", [])
    if len(references) != len(wanted):
        return f"{len(references)} pictures for a prompt with {len(wanted)}"
    try:
        given = _given(references, data)
    except PictureError as error:
        return str(error)
    for number, (reference, encoded, source) in enumerate(zip(references, given, wanted, strict=True)):
        digest, _, path = reference.split(":", 2)
        if (path or encoded) != source or (not path and digest != digest_of(encoded)):
            return f"picture {number} is not that of its prompt"
    return None
