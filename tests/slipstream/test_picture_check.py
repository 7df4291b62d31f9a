"""Pictures before a run starts: what does not go with them, what a step of them takes, and too long prompts."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from configs.base import ConfigError
from configs.loading import load
from configs.schema import Config
from examples.pictures import save_model, save_pictures
from replay.data import load_rows
from rollout_server.tasks.task import Task
from slipstream.check.pictures import PictureCheck, problem_with_pictures
from slipstream.check.prompts import PromptEncoder, check_prompts
from slipstream.runtime.fingerprint import read_json

GIB = 1024**3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision model, and rows: a file, two pictures of which one is bytes, and text."""
    path = tmp_path_factory.mktemp("pictures")
    rows = save_pictures(path, 2, seed=1)
    asked = [{"role": "user", "content": "<image> which <image> is this ?"}]
    url = "data:image/png;base64,"
    url += base64.b64encode((path / "pictures" / "1.png").read_bytes()).decode()
    rows[1] = {"prompt": asked, "images": ["pictures/0.png", url], "answer": "red"}
    rows.append({"prompt": [{"role": "user", "content": "which colour ?"}], "answer": "red"})
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_model(path / "model", 0)
    return path


def config_of(folder: Path, *settings: str) -> Config:
    return load("pictures", [f"model.path={folder / 'model'}", f"data.train={folder / 'rows.jsonl'}", *settings])


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("algorithm.kl=k3", "algorithm.kl: 'k3' with a qwen2_vl model: a reference model sees no pictures"),
        ("learner.mesh.tensor=2", "learner.mesh.tensor: 2 with a qwen2_vl model"),
        ("algorithm.advantage=gae", "algorithm.advantage: 'gae' with a qwen2_vl model: a critic sees no pictures"),
    ],
)
def test_what_sees_no_pictures_is_refused(setting: str, said: str) -> None:
    config = load("pictures", [setting, "placement.split=1:2"])
    assert said in problem_with_pictures(config, {"model_type": "qwen2_vl"})
    assert problem_with_pictures(config, {"model_type": "qwen2"}) == ""


def test_sglang_sees_patches_of_14_pixels_alone() -> None:
    config, model = load("pictures", ["rollout.engine=sglang"]), {"model_type": "qwen2_5_vl"}
    assert problem_with_pictures(config, model) == problem_with_pictures(load("pictures"), model) == ""
    said = problem_with_pictures(config, {**model, "vision_config": {"patch_size": 4}})
    assert "whose patches have 96 values" in said and "take rollout.engine=torch" in said


def test_tokens_of_pictures_count(folder: Path) -> None:
    """Exactly as the rollout servers count them, so that a run does not start with prompts that never fit."""
    encode, task = PromptEncoder(config_of(folder)), Task(config_of(folder))
    rows = list(load_rows(folder / "rows.jsonl"))
    lengths = [encode.length(row) for row in rows]
    assert lengths == [len(task.encode(row)) for row in rows]
    assert max(lengths) > 20 > min(lengths)
    (folder / "two.jsonl").write_text("".join((folder / "rows.jsonl").read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ConfigError, match=f"data.max_prompt_tokens: 8, .* {min(lengths[:2])} to {max(lengths)} tokens"):
        list(check_prompts(config_of(folder, "data.max_prompt_tokens=8"), str(folder / "two.jsonl")))


def test_agents_take_no_rows_with_pictures(folder: Path) -> None:
    agent = ("environment.function={agent: {command: [python, a.py]}}",)
    encode = PromptEncoder(config_of(folder, *agent))
    *shown, text = load_rows(folder / "rows.jsonl")
    assert encode.length(text) == 5
    for row in shown:
        with pytest.raises(ConfigError, match=r"environment\.function: 'agent', and the row has pictures"):
            encode.length(row)


def test_a_step_of_pictures_must_fit_into_memory(folder: Path) -> None:
    """24 patches of 96 values in the largest picture here; those of Qwen2.5-VL are 16,000 times as large."""
    *_, said_of_pictures = check_prompts(config_of(folder), str(folder / "rows.jsonl"))
    assert "tokens; the largest row's are 0.0 MiB of pixels" in said_of_pictures.what
    config = config_of(folder, "rollout.groups_per_step=1024")
    check = PictureCheck(config, read_json(folder / "model" / "config.json"))
    assert check.report("x.jsonl", GIB) == ""
    assert sum(check.tokens(row) for row in load_rows(folder / "rows.jsonl")) > 3
    said = check.report("x.jsonl", GIB)
    assert "rollout.groups_per_step 1024" in said and "travel in messages and the journal" in said
    with pytest.raises(ConfigError, match=r"lower size.longest_edge in the model's preprocessor_config.json, or roll"):
        check.report("x.jsonl", 1024**2)


def test_a_model_of_text_takes_no_rows_with_pictures(folder: Path) -> None:
    row: Any = {"prompt": "x", "images": [str(folder / "pictures" / "0.png")]}
    with pytest.raises(ConfigError, match=r"1 pictures, and model\.path is a 'qwen3' model, which takes none"):
        PictureCheck(config_of(folder), {"model_type": "qwen3"}).tokens(row)
