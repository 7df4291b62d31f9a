"""Rows with pictures: columns and parts of every convention, refusals by name; references that travel."""

import base64
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from replay import messages as m
from replay.channel import frames
from replay.data import DataError, load_rows
from slipstream.families.pictures import (
    PictureError,
    Vision,
    decode,
    opened,
    packed,
    problem_with,
    unpacked,
)

VISION = Vision(image_token=9, video_token=8, merge=2)
SAID = [{"type": "image"}, {"type": "text", "text": " what?"}]


def png(size: tuple[int, int] = (4, 4), colour: int = 0) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (colour, 0, 0)).save(file, "PNG")
    return file.getvalue()


def dataset(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "a.png").write_bytes(png())
    (folder / "b.png").write_bytes(png(colour=9))
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"answer": "x", **row}) + "\n" for row in rows))
    return str(path)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


URL = "data:image/png;base64," + base64.b64encode(png()).decode()


@pytest.mark.parametrize(
    ("row", "parts", "names"),
    [
        ({"prompt": user("<image> what?"), "images": ["a.png"]}, SAID, ["a.png"]),
        ({"prompt": user("<image> what?"), "images": [{"path": "a.png", "bytes": None}]}, SAID, ["a.png"]),
        ({"prompt": user("<image> what?"), "images": [{"image": "a.png"}]}, SAID, ["a.png"]),
        ({"prompt": user(" what?"), "image": "a.png"}, SAID, ["a.png"]),
        ({"question": " what?", "image": "a.png"}, SAID, ["a.png"]),
        ({"prompt": user(SAID), "images": ["a.png"]}, SAID, ["a.png"]),
        ({"prompt": user([{"type": "image", "image": "a.png"}, SAID[1]])}, SAID, ["a.png"]),
        ({"prompt": user([{"type": "image_url", "image_url": {"url": URL}}, SAID[1]])}, SAID, [png()]),
        ({"prompt": user("<image><image> what?"), "images": ["b.png", URL]}, [SAID[0], *SAID], ["b.png", png()]),
    ],
)
def test_pictures_of_every_convention(tmp_path: Path, row: Any, parts: Any, names: list[Any]) -> None:
    (found,) = load_rows(dataset(tmp_path, row))
    assert found["prompt"] == user(parts)
    assert found["images"] == [name if isinstance(name, bytes) else str(tmp_path / name) for name in names]
    assert not {"image", "images"} & found["columns"].keys()


def test_bytes_of_a_parquet_column(tmp_path: Path) -> None:
    """As `datasets` writes its Image feature."""
    arrow = pytest.importorskip("pyarrow", reason="parquet needs the extra parquet")
    table = {"prompt": [user("what?")], "images": [[{"bytes": png(), "path": None}]], "answer": ["x"]}
    arrow.parquet = __import__("pyarrow.parquet").parquet
    arrow.parquet.write_table(arrow.table(table), tmp_path / "rows.parquet")
    (row,) = load_rows(tmp_path / "rows.parquet")
    assert row["images"] == [png()] and row["prompt"][0]["content"][0] == {"type": "image"}
    lease = m.Lease(pass_=0, index=0, attempt=1, min_version=0, lease_s=1.0, seed=1, prompt=row)
    evaluation = m.EvaluationLease(
        version=1, set="", greedy=True, first=0, samples=1, temperature=1.0, max_new_tokens=8, seed=1, prompts=[row]
    )
    lease, evaluation = (frames.decode(frames.encode(x, "run", 1), m.FROM_REPLAY).message for x in (lease, evaluation))
    assert lease.prompt == row and evaluation.prompts == [row]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": user("<image>"), "images": ["c.png"]}, ["'images[0]'", "there is no picture", "c.png"]),
        ({"prompt": user("<image>"), "images": ["https://x/y.png"]}, ["not fetched from other machines"]),
        ({"prompt": user("<image>"), "images": [7]}, ["'images[0]'", "found an int"]),
        ({"prompt": user("<image>"), "images": [{"size": 3}]}, ["expected a picture"]),
        ({"prompt": user("<image>"), "images": ["a.png", "b.png"]}, ["2 pictures", "room for 1"]),
        ({"prompt": [{"role": "system", "content": "x"}], "images": ["a.png"]}, ["room for 0"]),
        ({"prompt": "what?", "images": ["a.png"]}, ["text with pictures", "chat messages"]),
        ({"prompt": user("x"), "images": ["a.png"], "image": "b.png"}, ["'image'", "as well"]),
        ({"prompt": user("x"), "images": ["data:image/png,xx"]}, [";base64,"]),
        ({"prompt": user("x"), "images": ["data:image/png;base64,eHg="]}, ["no PNG"]),
        ({"prompt": user([{"type": "video"}])}, ["'prompt[0].content[0]'", "expected"]),
    ],
)
def test_refusals_name_row_column_and_value(tmp_path: Path, row: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(DataError) as raised:
        load_rows(dataset(tmp_path, row))
    for part in ["rows.jsonl: row 1", *expected]:
        assert part in str(raised.value)


def test_a_large_picture_must_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replay.data.pictures.INLINE_BYTES", 32)
    assert load_rows(dataset(tmp_path, {"prompt": user("x"), "images": ["a.png"]}))[0]["images"]
    with pytest.raises(DataError, match="store it as a file"):
        load_rows(dataset(tmp_path, {"prompt": user("x"), "images": [URL]}))


def test_pictures_that_are_none_of_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PictureError, match="not a readable picture"):
        decode(opened(png()[:40]))
    monkeypatch.setattr("slipstream.families.pictures.MAX_PIXELS", 15)
    with pytest.raises(PictureError, match="4 x 4 pixels, at most 15"):
        decode(opened(png()))


def test_pictures_travel_by_path_or_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a:b.png"
    file.write_bytes(png(colour=3))
    sent = packed([opened(png()), opened(str(file))])
    assert sent["picture_bytes"].tobytes() == png()
    assert [picture.data for picture in unpacked(sent["pictures"], sent["picture_bytes"])] == [png(), png(colour=3)]
    file.write_bytes(png(colour=4))
    with pytest.raises(PictureError, match=r"a:b\.png: its bytes are not those"):
        unpacked(sent["pictures"], sent["picture_bytes"])


@dataclasses.dataclass
class Arrived:
    """The part of a group that is looked at."""

    pictures: list[str]
    picture_bytes: Any
    prompt_lengths: Any = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))


def test_a_group_has_the_pictures_of_its_prompt(tmp_path: Path) -> None:
    """A server cannot make the learner read another file, or train on another picture."""
    (tmp_path / "a.png").write_bytes(png())
    row = {"images": [str(tmp_path / "a.png"), png(colour=1)]}
    group: Any = Arrived(**packed([opened(image) for image in row["images"]]))
    assert (
        problem_with(group.pictures, group.picture_bytes, row) is None
        and problem_with([], np.zeros(0, np.uint8), {}) is None
    )
    assert "2 pictures for a prompt with 0" in str(problem_with(group.pictures, group.picture_bytes, {}))
    for other in ([str(tmp_path / "b.png"), png(colour=1)], [str(tmp_path / "a.png"), png(colour=2)]):
        assert "is not that of its prompt" in str(problem_with(group.pictures, group.picture_bytes, {"images": other}))
    group.pictures = [group.pictures[0], group.pictures[1].replace(":", ":9", 1)]
    assert "bytes of pictures" in str(problem_with(group.pictures, group.picture_bytes, row))
    group.pictures = ["x", "y"]
    assert "expected digest:size:path" in str(problem_with(group.pictures, group.picture_bytes, row))


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 3)), max_size=4),
    st.integers(0, 5),
    st.lists(st.sampled_from([2, 9]), max_size=6),
)
def test_positions_of_text_and_pictures(shapes: list[tuple[int, int, int]], answer: int, sampled: list[int]) -> None:
    """Text counts by one on all axes, a picture is as long as its longer side, and the answer goes on after it.

    So does what earlier turns have sampled, also where it has tokens of pictures (9).
    """
    ids, grids = [1], []
    for rows, columns, text in shapes:
        ids += [9, *[2] * (text + 1)]
        grids.append((1, rows * 2, columns * 2))
    prompt = np.array(VISION.expand(ids, grids))
    found = VISION.positions(prompt, grids, len(prompt) + answer)
    assert (found >= 0).all() and (np.diff(found.max(0)) >= -3).all()
    is_text = np.r_[prompt != 9, np.ones(answer, bool)]
    assert (found[:, is_text] == found[0, is_text]).all()
    length = 1 + sum(max(rows, columns) + text + 1 for rows, columns, text in shapes) + answer
    assert found[0, -1] == length - 1
    later = np.r_[prompt, np.array(sampled, prompt.dtype)]
    assert (VISION.positions(later, grids, len(prompt) + answer) == found).all() or len(sampled) > answer
    assert VISION.places(later, grids).tolist() == np.flatnonzero(prompt == 9).tolist()
    for (first, last), (rows, columns, _) in zip(VISION.spans(later, grids), shapes, strict=True):
        assert last - first + 1 == rows * columns and (prompt[first : last + 1] == 9).all()
    assert len(VISION.places(prompt, grids)) == sum(rows * columns for rows, columns, _ in shapes)
