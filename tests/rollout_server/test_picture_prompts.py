"""Prompts with pictures: from a row to tokens, and the torch engine's logprobs beside transformers' own forward."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import strategies as st

from configs.loading import load
from examples.pictures import IDS, save_model, save_pictures
from replay.data import load_rows
from replay.data.pictures import MARK
from rollout_server.engines.base import Completion, EngineError, Partial, Sampling
from rollout_server.engines.sglang import process
from rollout_server.engines.sglang.process import image_data
from rollout_server.engines.torch.engine import TorchEngine
from rollout_server.tasks.pictures import PictureProcessor, Prompt
from rollout_server.tasks.task import Task, TaskError
from slipstream.families.pictures import PictureError, grid_of, vision_of
from slipstream.runtime.fingerprint import read_json
from tests.support.waiting import eventually

IMAGE = IDS["<|image_pad|>"]
ODD = Partial(
    token_ids=np.array([IMAGE, IDS["<|vision_start|>"], IMAGE, IMAGE], np.int32),
    logprobs=np.full(4, -1.0, np.float32),
    versions=np.zeros(4, np.int32),
)
"""A beginning of an answer that looks like pictures."""


def prompts_in(folder: Path, count: int, **model: Any) -> list[Prompt]:
    """Prompts about so many pictures, and one of text; the model is beside them."""
    rows = save_pictures(folder, count, seed=1)
    asked = {"role": "user", "content": f"{MARK} which {MARK} is this ?"}
    rows[0] = {"prompt": [asked], "images": ["pictures/0.png", "pictures/1.png"], "answer": "red"}
    rows.append({"prompt": [{"role": "user", "content": "which colour ?"}], "answer": "red"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_model(folder / "model", 0, **model)
    task = Task(load("quickstart", [f"model.path={folder / 'model'}", "data.max_prompt_tokens=400"]))
    return [task.prompt(row) for row in load_rows(folder / "rows.jsonl")]


def reference(folder: Path, prompt: Prompt, answer: Completion) -> torch.Tensor:
    """Logprobs of the answer by transformers, on the weights of the folder."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt.token_ids + answer.token_ids.tolist()])
    # what is sampled is text, also where it is the token of a picture
    kinds = (ids == IMAGE).int() * (torch.arange(ids.shape[1]) < len(prompt.token_ids))
    given: dict[str, Any] = {"input_ids": ids}
    if prompt.pictures is not None:
        positions, _ = model.model.get_rope_index(ids, kinds, torch.tensor(prompt.pictures.grids))
        with torch.no_grad():
            embedded = model.model.get_input_embeddings()(ids)
            seen = model.model.get_image_features(
                torch.from_numpy(prompt.pictures.pixels), torch.tensor(prompt.pictures.grids)
            ).pooler_output
            embedded[kinds.bool()] = torch.cat(seen)
        given = {"inputs_embeds": embedded, "position_ids": positions}
    with torch.no_grad():
        logits = model(**given).logits[0, -answer.token_ids.size - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, -answer.token_ids.size :, None])[:, 0]


@pytest.mark.parametrize(("family", "tied"), [("qwen2_vl", True), ("qwen2_5_vl", False)])
async def test_the_torch_engine_equals_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    """Prompts with two, one and no pictures decoded at once, also those whose KV is computed anew midway.

    So are answers that have sampled tokens of pictures, which are text there.
    """
    prompts = prompts_in(tmp_path, 3, family=family, tied=tied)
    assert [len(prompt.sources) for prompt in prompts] == [2, 1, 1, 0]
    engine = TorchEngine(tmp_path / "model", max_context=512, max_running=16, seed=3)
    try:
        sampling = Sampling(max_new_tokens=24)
        asked = [
            engine.generate(p.token_ids, sampling, 2, request_id=str(i), **given(p)) for i, p in enumerate(prompts)
        ]
        last = prompts[1]
        asked.append(engine.generate(last.token_ids, sampling, 2, request_id="x", prefixes=[ODD, ODD], **given(last)))
        running = asyncio.gather(*asked)
        await eventually(lambda: sum(engine.running_tokens().values()) >= 8, "tokens")
        await engine.pause("recompute_kv")
        await engine.load([(n, t.clone()) for n, t in engine.live.weights._updated.items()], 1)
        await engine.resume()
        answers = await running
    finally:
        await engine.close()
    versions = np.concatenate([answer.versions for two in answers for answer in two])
    assert set(versions.tolist()) == {0, 1}
    for prompt, two, known in zip([*prompts, last], answers, [0, 0, 0, 0, ODD.token_ids.size], strict=True):
        for answer in two:
            wanted = reference(tmp_path / "model", prompt, answer)
            assert torch.allclose(torch.from_numpy(answer.logprobs)[known:], wanted[known:], atol=1e-5)


def given(prompt: Prompt) -> dict[str, Any]:
    return {} if prompt.pictures is None else {"pictures": prompt.pictures}


async def test_a_prompt_without_the_tokens_of_its_pictures_is_refused(tmp_path: Path) -> None:
    (prompt, *_) = prompts_in(tmp_path, 2)
    engine = TorchEngine(tmp_path / "model", max_context=512, max_running=4)
    try:
        with pytest.raises(EngineError, match="tokens of pictures"):
            await engine.generate(
                prompt.token_ids[:-9], Sampling(max_new_tokens=1), 1, request_id="a", pictures=prompt.pictures
            )
    finally:
        await engine.close()


def test_sglang_is_given_places_and_positions(tmp_path: Path) -> None:
    """It would take sampled tokens of pictures for pictures, and has no positions for what it retracts."""
    (prompt, *_) = prompts_in(tmp_path, 2)
    assert prompt.pictures is not None
    vision = vision_of(read_json(tmp_path / "model" / "config.json"))
    assert vision is not None
    plain = image_data(prompt.pictures, vision, prompt.token_ids, 9)
    later = image_data(prompt.pictures, vision, prompt.token_ids + ODD.token_ids.tolist(), 5)
    assert len(plain["offsets"]) == 2 and plain["offsets"] == later["offsets"]
    assert torch.equal(plain["mrope_positions"], later["mrope_positions"])
    total = len(prompt.token_ids) + 9
    assert plain["mrope_positions"].shape == (3, total)
    assert plain["mrope_position_delta"].item() == plain["mrope_positions"][0, -1].item() + 1 - total < 0


def test_a_group_prepares_its_pictures_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt, *_) = prompts_in(tmp_path, 2)
    assert prompt.pictures is not None
    sglang, made = process.SGLangProcess.__new__(process.SGLangProcess), []
    sglang._vision, sglang._pictures = vision_of(read_json(tmp_path / "model" / "config.json")), None
    monkeypatch.setattr(process, "image_data", lambda *given: made.append(given) or image_data(*given))
    found = [sglang._image_data(prompt.pictures, list(prompt.token_ids), 9) for _ in range(8)]
    assert len(made) == 1 and all(one["pixel_values"] is found[0]["pixel_values"] for one in found)
    sglang._image_data(prompt.pictures, list(prompt.token_ids), 5)
    assert len(made) == 2


@drawn(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([{}, {"min_pixels": 256, "max_pixels": 4096}]))
def test_sizes_are_those_of_the_image_processor(width: int, height: int, limits: dict[str, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    processor = Qwen2VLImageProcessorPil(patch_size=4, **limits)
    described = json.loads(processor.to_json_string())
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(PictureError, match="200 times"):
            grid_of(width, height, described)
        return
    least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
    rows, columns = smart_resize(height, width, 8, least, most)
    assert grid_of(width, height, described) == (1, rows // 4, columns // 4)
    if limits:  # as older folders have them
        assert grid_of(width, height, {"patch_size": 4, **limits}) == (1, rows // 4, columns // 4)


def test_a_model_of_text_takes_no_pictures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(TaskError, match=r"1 pictures, and model.path .* is a 'qwen3' model, which takes none"):
        PictureProcessor(str(tmp_path)).look(["x.png"])
