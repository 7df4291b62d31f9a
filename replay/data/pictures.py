"""Pictures of raw rows: found in their columns and messages, normalised to paths and bytes.

| convention | pictures                                | where they stand                                   |
|------------|-----------------------------------------|----------------------------------------------------|
| verl       | `images`: {"bytes": ..., "path": ...},  | `<image>` in the text of the messages              |
|            | or {"image": ...}                       |                                                    |
| TRL        | `images` or `image`                     | {"type": "image"} among a message's parts; without |
|            |                                         | any, before the text of the first user message     |
| OpenAI     | in the parts of messages                | where the part is                                  |
"""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import kind_of
from replay.data.conventions import Convention, normalize
from replay.data.rows import Row, RowLocation

COLUMNS = ("images", "image")
KEYS = ("image", "image_url", "path", "url")
LISTS = (list, tuple, np.ndarray)
MARK = "<image>"
"""In the text of a message: here stands the next picture."""
INLINE_BYTES = 4 * 1024**2
"""A picture in a row travels with its prompt, its group and its batch; a larger one is named by its file."""
ROWS_BYTES = 24 * 1024**2
"""Pictures of one row, and of the rows of one lease, that travel with it: a header has room for twice as many, and what
an environment's process is sent for the rest of the row."""
MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM")
STORE = "store it as a file that all nodes see, and give its path"
Source = str | bytes
"""Absolute path, or encoded bytes."""


def row_of(raw: Mapping[str, Any], convention: Convention, place: RowLocation) -> Row:
    """A raw row as a `Row`; one with pictures has messages of parts, and `images` in the order of the parts.

    Raises:
        RowError: as `normalize`; or a picture is missing, too large, on another machine, or stands nowhere.
    """
    if not _has_pictures(raw):
        return normalize(raw, convention, place)
    given = _of_columns(raw, place)
    column = "question" if "prompt" not in raw else "prompt"
    messages = raw.get(column)
    if isinstance(messages, str):
        if column == "prompt":
            raise place.error(
                column, messages, "text with pictures; give chat messages, as [{role: user, content: text}]"
            )
        messages = [{"role": "user", "content": messages}]
    messages, inside = list(messages) if isinstance(messages, LISTS) else [], list[Source]()
    contents = [_parts(m, f"{column}[{i}].content", place, inside) for i, m in enumerate(messages)]
    if inside and given:
        raise place.error("images", f"{len(given)} pictures", f"{len(inside)} more stand in the messages; keep one")
    texts = [{**m, "content": _text_of(parts)} for m, parts in zip(messages, contents, strict=True)]
    plain = {**{key: value for key, value in raw.items() if key not in COLUMNS}, column: texts}
    row, images = normalize(plain, convention, place), inside or given
    _place_the_rest(row["prompt"], contents, images, place)
    if (size := inline_bytes({"images": images})) > ROWS_BYTES:
        said = f"{size} bytes in all, at most {ROWS_BYTES} travel with a row: {STORE}"
        raise place.error("images", f"{len(images)} pictures", said)
    if images:
        for message, parts in zip(row["prompt"], contents, strict=True):
            message["content"] = parts
        row["images"] = images
    return row


def _has_pictures(raw: Mapping[str, Any]) -> bool:
    """Whether a raw row has a column of pictures with something in it, or messages of parts."""
    if any(_is_filled(raw.get(column)) for column in COLUMNS):
        return True
    prompt = raw.get("prompt")
    return isinstance(prompt, LISTS) and any(
        isinstance(message, Mapping) and isinstance(message.get("content"), LISTS) for message in prompt
    )


def _is_filled(value: object) -> bool:
    return value is not None and not (isinstance(value, (*LISTS, str, bytes)) and len(value) == 0)


def inline_bytes(row: Mapping[str, Any]) -> int:
    """Bytes of a row's pictures that travel with it."""
    return sum(len(image) for image in row.get("images", ()) if isinstance(image, bytes))


def _text_of(parts: list[dict[str, str]]) -> str:
    return "".join(part.get("text", MARK) for part in parts)


def _of_columns(raw: Mapping[str, Any], place: RowLocation) -> list[Source]:
    found: list[Source] = []
    for column in COLUMNS:
        value = raw.get(column)
        if not _is_filled(value):
            continue
        if found:
            raise place.error(column, value, f"pictures in {COLUMNS[0]!r} as well; keep one of the columns")
        listed = list(value) if isinstance(value, LISTS) else [value]
        found = [source_of(each, f"{column}[{i}]", place) for i, each in enumerate(listed)]
    return found


def _parts(message: Any, column: str, place: RowLocation, inside: list[Source]) -> list[dict[str, str]]:
    """Parts of one message, with `<image>` cut out of its text; pictures that stand in them are added to `inside`."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, str):
        return _cut(content)
    if not isinstance(content, LISTS):
        raise place.error(column, content, "expected text or a list of parts")
    parts: list[dict[str, str]] = []
    for number, part in enumerate(content):
        where = f"{column}[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts += [{"type": "text", "text": part["text"]}]
        elif kind in ("image", "image_url"):
            value = _first(part, KEYS)
            inside += [] if value is None else [source_of(value, where, place)]
            parts.append({"type": "image"})
        else:
            raise place.error(where, part, 'expected {"type": "text", "text": ...} or {"type": "image"}')
    return parts


def _cut(text: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def _place_the_rest(
    messages: list[dict[str, Any]], contents: list[list[dict[str, str]]], images: list[Source], place: RowLocation
) -> None:
    """Where no message says where pictures stand, they stand before the first user message's text."""
    marks = sum(part["type"] == "image" for parts in contents for part in parts)
    if marks == len(images):
        return
    user = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if marks or user is None:
        raise place.error(
            "images",
            f"{len(images)} pictures",
            f"the messages have room for {marks} ({MARK} or an image part); make both alike",
        )
    contents[user][:0] = [{"type": "image"} for _ in images]


def source_of(value: Any, column: str, place: RowLocation) -> Source:
    """One picture as a row has it: a path, a `file://` or `data:` URL, bytes, or a mapping with one of these.

    Raises RowError: of another machine, not there, no picture, or too large to travel.
    """
    if isinstance(value, Mapping):
        if (inner := _first(value, ("bytes", *KEYS))) is None:
            raise place.error(column, value, 'expected a picture: a path, bytes, or {"bytes": ..., "path": ...}')
        return source_of(inner, column, place)
    if isinstance(value, (bytes, bytearray)):
        return _inline(bytes(value), column, place)
    if not isinstance(value, str):
        raise place.error(column, value, f"expected a path or the bytes of a picture, found {kind_of(value)}")
    if value.startswith("data:"):
        return _inline(_decoded(value, column, place), column, place)
    if "://" in value and not value.startswith("file://"):
        raise place.error(column, value, "pictures are not fetched from other machines; download it, and give its path")
    path = Path(value.removeprefix("file://")).expanduser()
    path = Path(os.path.abspath(path if path.is_absolute() else Path(place.source).parent / path))
    if not path.is_file():
        raise place.error(column, value, f"there is no picture {path}; paths are relative to the folder of the dataset")
    return str(path)


def _first(value: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _decoded(url: str, column: str, place: RowLocation) -> bytes:
    head, _, body = url.partition(",")
    if not head.endswith(";base64"):
        raise place.error(column, url, "expected data:image/...;base64,...")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise place.error(column, url, f"not base64: {error}") from error


def _inline(data: bytes, column: str, place: RowLocation) -> bytes:
    if not data.startswith(MAGIC):
        raise place.error(column, data[:16], "these bytes are no PNG, JPEG, WebP, GIF or BMP picture")
    if len(data) > INLINE_BYTES:
        said = f"a picture of {len(data)} bytes; one of more than {INLINE_BYTES} is not sent about: {STORE}"
        raise place.error(column, data[:16], said)
    return data
