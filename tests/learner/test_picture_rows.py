"""Rows with pictures in the learner: equal to transformers' own forward, whatever else stands in the row."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.pictures import IDS, save_model, save_pictures
from learner.pictures import PictureDecoder
from learner.policy.model import Policy, build_policy
from learner.rows import Row, lay_out
from replay.messages import Batch
from slipstream.families.pictures import PictureError, decode, opened, packed, vision_of
from slipstream.runtime.fingerprint import read_json
from slipstream.vision import Pixels
from tests.learner.recorded import batch_of
from tests.learner.reference import Recorded
from tests.learner.tiny_models import make_config, process_group

IMAGE, ASK, ANSWERS = IDS["<|image_pad|>"], [IDS["which"], IDS["?"]], ([IDS["red"], IDS["<eos>"]], [IDS["blue"]] * 3)


def shown_batch(folder: Path, *, bare: bool = False) -> Batch:
    """Group 0 asks about pictures 0 and 1, group 1 about 2 and 1 in the same tokens: 0 and 2 are of one size.

    Where `bare`, the second prompt of group 0 shows none, as one of an episode may.
    """
    vision = vision_of(read_json(folder / "model" / "config.json"))
    assert vision is not None
    groups = [["0.png", "1.png"], ["2.png", "1.png"]]
    pictures = [[opened(str(folder / "pictures" / name)) for name in names] for names in groups]
    wrapped = [IDS["<|vision_start|>"], IMAGE, IDS["<|vision_end|>"]]
    recorded = []
    for number, own in enumerate(pictures):
        grids = [Pixels(folder / "model").of(decode(one))[1] for one in own]
        prompt = vision.expand([IDS["<user>"], *wrapped, *ASK, *wrapped, IDS["<assistant>"]], grids)
        recorded += [
            Recorded(
                prompt_ids=[IDS["<user>"], *ASK] if bare and number == 0 and i == 1 else prompt,
                response_ids=answer,
                loss_mask=[1] * len(answer),
                logprobs=[-1.0] * len(answer),
                versions=[4] * len(answer),
                reward=float(i),
                group=number,
            )
            for i, answer in enumerate(ANSWERS)
        ]
    fields = packed([one for own in pictures for one in own])
    return dataclasses.replace(batch_of(recorded, 5), **fields, picture_counts=np.array([2, 2], np.int32))


def same_size(folder: Path) -> Path:
    """Pictures 0 and 2 of one size: prompts about them have the same tokens."""
    from PIL import Image

    save_pictures(folder, 3, seed=0)
    for name, size in (("0", (16, 24)), ("1", (33, 16)), ("2", (16, 24))):
        file = folder / "pictures" / f"{name}.png"
        Image.open(file).resize(size).save(file)
    return folder


def rows_of(batch: Batch, folder: Path, share: bool) -> list[Row]:
    looker = PictureDecoder.of(folder / "model")
    assert looker is not None
    ones = np.ones(len(batch.all_rewards), np.float32)
    return lay_out(batch, ones, ones, share, looker.look(batch))


def expected(folder: Path, batch: Batch) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logprobs by transformers, one trajectory at a time, and the gradient of their sum."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32).eval()
    looker = PictureDecoder.of(folder / "model")
    assert looker is not None
    shown = looker.look(batch)
    assert shown is not None
    ends = np.cumsum(batch.prompt_lengths + batch.lengths)
    found = []
    for i, end in enumerate(ends.tolist()):
        length = int(batch.lengths[i])
        ids = torch.from_numpy(batch.token_ids[end - length - int(batch.prompt_lengths[i]) : end].astype(np.int64))[
            None
        ]
        numbers = shown.numbers[i]
        given = {
            "pixel_values": torch.from_numpy(np.concatenate([shown.pixels[n] for n in numbers])),
            "image_grid_thw": torch.tensor([shown.grids[n] for n in numbers]),
            "mm_token_type_ids": (ids == IMAGE).int(),
        } if numbers else {}  # fmt: skip
        logits = model(input_ids=ids, **given).logits[0, -length - 1 : -1]
        targets = ids[0, -length:, None]
        found.append(logits.float().log_softmax(-1).gather(1, targets)[:, 0])
    torch.cat(found).sum().backward()
    names = {n.replace("model.language_model.", "model."): p.grad for n, p in model.named_parameters()}
    return found, {name: grad for name, grad in names.items() if grad is not None}


@pytest.mark.parametrize(
    ("family", "tied", "share", "bare"), [("qwen2_vl", True, False, True), ("qwen2_5_vl", False, True, False)]
)
def test_rows_with_pictures_equal_transformers(
    tmp_path: Path, family: str, tied: bool, share: bool, bare: bool
) -> None:
    """Four trajectories in one row, two of them with other pictures under the same tokens: logprobs and gradient."""
    save_model(same_size(tmp_path) / "model", 0, family, tied=tied)
    batch = shown_batch(tmp_path, bare=bare)
    wanted, gradient = expected(tmp_path, batch)
    assert not torch.allclose(wanted[0], wanted[2], atol=1e-3)  # the pictures matter
    with process_group(tmp_path / "store") as mesh:
        policy: Policy = build_policy(make_config(tmp_path / "model"), mesh, torch.device("cpu"))
        (row,) = rows_of(batch, tmp_path, share)
        assert (row.saved > 0) == share
        policy.prepare_row(last=True)
        found, _ = policy.forward(row, 1.0)
        found.sum().backward()
        assert torch.allclose(found, torch.cat(wanted), atol=1e-5)
        for name, parameter in policy.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad.full_tensor(), gradient[name], atol=1e-5), name


def test_a_picture_that_was_changed_is_refused(tmp_path: Path) -> None:
    save_model(same_size(tmp_path) / "model", 0)
    batch = shown_batch(tmp_path)
    (tmp_path / "pictures" / "1.png").write_bytes((tmp_path / "pictures" / "0.png").read_bytes())
    with pytest.raises(PictureError, match=r"batch 5, rank 0: .*1\.png: its bytes are not those"):
        rows_of(batch, tmp_path, False)
