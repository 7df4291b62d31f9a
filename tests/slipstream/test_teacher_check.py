"""What a dry run says of teachers that could not score this run's answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs import Config
from configs.errors import BadPlacement, ConfigError
from examples.random_qwen3 import make
from slipstream.check import teachers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    for name, shape in (("policy", "tiny"), ("teacher", "tiny"), ("other", "10M"), ("short", "tiny")):
        make(shape, path / name, 0)
    described = json.loads((path / "short" / "config.json").read_text())
    (path / "short" / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 20}))
    rows = [{"prompt": f"w{n}", "answer": "w7", "level": n % 2} for n in range(5, 9)]
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(folder: Path, teacher: dict[str, Any], *, temperature: float = 1.0, engine: str = "torch") -> Config:
    given = {name: str(folder / value) if name == "path" else value for name, value in teacher.items()}
    return Config.model_validate(
        {
            "model": {"path": str(folder / "policy")},
            "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 8},
            "rollout": {"max_new_tokens": 16, "temperature": temperature, "engine": engine},
            "teachers": {"big": given},
            "algorithm": {"distillation": "sampled"},
        }
    )


URL = {"url": "http://h/v1", "model": "m"}
GOOD: list[dict[str, Any]] = [
    {"path": "teacher"},
    URL,
    {"of": "policy", "context": "{prompt} {level}"},
    {"of": "lagged"},
]
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"path": "none"}, {}, r"teachers\.big\.path: no folder"),
    ({"path": "other"}, {}, r"teachers\.big\.path: .* has the tokenizer"),
    ({"path": "short"}, {}, "max_position_embeddings 20, and is to score 24 tokens"),
    (URL, {"temperature": 0.7}, r"teachers\.big: an endpoint .* rollout\.temperature is 0\.7"),
    (
        {"of": "policy", "context": "{prompt}"},
        {"temperature": 0.7, "engine": "sglang"},
        "rollout.engine 'sglang' gives",
    ),
    (URL | {"key_variable": "NO_SUCH_KEY"}, {}, r"teachers\.big\.key_variable: no environment variable NO_SUCH_KEY"),
    ({"path": "teacher", "rows": {"level": 1}}, {}, r"train\.jsonl: row 2: teachers: none of big takes the row 'w6'"),
    ({"of": "policy", "context": "{prompt} {hint}"}, {}, r"row 1: teachers\.big\.context: the row 'w5' has no 'hint'"),
]


@pytest.mark.parametrize("teacher", GOOD)
def test_teachers_that_can_score_are_named(folder: Path, teacher: dict[str, Any]) -> None:
    (found,) = teachers.check(config_of(folder, teacher))
    assert (found.severity, found.code) == ("ok", "teachers") and "big: " in found.text


@pytest.mark.parametrize(("teacher", "run", "says"), BAD)
def test_teachers_that_cannot_score_are_refused(
    folder: Path, teacher: dict[str, Any], run: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        list(teachers.check(config_of(folder, teacher, **run)))


def test_on_gpus_a_teacher_names_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "on_gpus", lambda _: True)
    with pytest.raises(BadPlacement, match=r"teachers\.big\.devices: missing"):
        list(teachers.check(config_of(folder, {"path": "teacher"})))
    monkeypatch.setattr(teachers, "gpu_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"weights take 0\.0 GiB on each of 2 GPUs of node0"):
        list(teachers.check(config_of(folder, {"path": "teacher", "devices": "node0:6-7"})))
