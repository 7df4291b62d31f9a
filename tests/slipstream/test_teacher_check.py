"""What a dry run says of teachers that could not score this run's answers."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from configs import Config
from configs.errors import BadPlacement, ConfigError
from configs.loading import dump
from configs.shared import shared_values
from examples.random_qwen3 import make
from slipstream.check import checks, teachers
from slipstream.launch import here
from slipstream.plan.processes import Machine, assign


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    for name, shape in (("policy", "tiny"), ("teacher", "tiny"), ("other", "10M"), ("short", "tiny")):
        make(shape, path / name, 0)
    described = json.loads((path / "short" / "config.json").read_text())
    (path / "short" / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 20}))
    shutil.copytree(path / "teacher", path / "cut")
    (path / "cut" / "model.safetensors").write_bytes(b"12345678")
    (path / "empty").mkdir()
    rows = [{"prompt": f"w{n}", "answer": "w7", "level": n % 2} for n in range(5, 9)]
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config_of(
    folder: Path,
    teacher: dict[str, Any],
    *,
    temperature: float = 1.0,
    engine: str = "torch",
    model: str = "policy",
    distillation: Any = "sampled",
) -> Config:
    given = {name: str(folder / value) if name == "path" else value for name, value in teacher.items()}
    return Config.model_validate(
        {
            "model": {"path": str(folder / model)},
            "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 8},
            "reward": {"function": "exact"},
            "rollout": {"max_new_tokens": 16, "temperature": temperature, "engine": engine},
            "teachers": {"big": given},
            "algorithm": {"distillation": distillation},
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
    ({"of": "policy", "context": "{prompt}"}, {"model": "short"}, "model.path: .* 20, and is to score 32 tokens"),
    (
        {"path": "teacher"},
        {"distillation": {"top_k": {"k": 513}}},
        "'k' is 513, and model.path has a vocabulary of 512",
    ),
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


@pytest.mark.parametrize("key", ["teachers.big.path", "algorithm.reference_path"])
@pytest.mark.parametrize("path", ["none", "empty", "other", "cut"])
def test_a_folder_beside_the_policy_that_cannot_be_used_is_refused_once(folder: Path, key: str, path: str) -> None:
    """The models of a run, its teachers and its memory are looked at one after the other."""
    teacher = {"path": path, "where": "learner"} if key.startswith("teachers") else URL
    run = config_of(folder, teacher, distillation="full" if key.startswith("teachers") else "sampled")
    if teacher is URL:
        settings = {"kl": "k3", "reference_path": str(folder / path)}
        run = run.model_copy(update={"algorithm": run.algorithm.model_copy(update=settings)})
    (stop,) = (one for one in checks.found(run, checks.OF_THE_RUN) if one.severity == "stop")
    assert stop.text.startswith(f"{key}: ")


def test_on_gpus_a_teacher_names_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "on_gpus", lambda _: True)
    with pytest.raises(BadPlacement, match=r"teachers\.big\.devices: missing"):
        list(teachers.check(config_of(folder, {"path": "teacher"})))
    monkeypatch.setattr(teachers, "gpu_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match=r"weights take 0\.0 GiB on each of 2 GPUs of node0"):
        list(teachers.check(config_of(folder, {"path": "teacher", "devices": "node0:6-7"})))


def test_processes_of_teachers_are_placed_and_started_by_their_node_s_side(folder: Path) -> None:
    """The first node's by the launcher, those of others by the rollout side, also where nothing else runs there."""
    run = config_of(folder, {"path": "teacher", "devices": "node0:3; node1:0-1"})
    placement = {"rollout": "node0:0-1", "learner": "node0:2", "device": "cuda"}
    network = {"host": "10.0.0.1", "insecure": True, "replay_port": 5757}
    run = Config.model_validate(run.model_dump() | {"placement": placement, "network": network})
    machines = {"node0": Machine("10.0.0.1", gpus=4), "node1": Machine("10.0.0.2", gpus=2)}
    plan = assign(run, machines, config_file="c.yaml")
    first, second = (process for process in plan.processes if process.role == "teacher")
    assert [(one.name, one.node, one.devices) for one in (first, second)] == [
        ("teacher-big-0", "node0", (3,)),
        ("teacher-big-1", "node1", (0, 1)),
    ]
    assert second.command[-6:] == ("--teacher", "big", "--process-name", "teacher-big-1", "--tensor-parallel", "2")
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert (plan.side(first), plan.side(second)) == ("learner", "rollout")
    assert plan.nodes("rollout") == ["node0", "node1"] and plan.nodes("learner") == ["node0"]
    shares = {share.node: (share.devices("learner"), share.devices("rollout")) for share in run.shares}
    assert shares == {"node0": ((2, 3), (0, 1)), "node1": ((), (0, 1))}
    with pytest.raises(ConfigError, match="node0:3 needs 4 GPUs"):
        assign(run, {**machines, "node0": Machine("10.0.0.1", gpus=3)}, config_file="c.yaml")


def test_a_host_that_joins_leaves_the_gpus_of_teachers_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own GPUs are counted from 0 on, whatever a teacher has elsewhere, and nobody compares those."""
    given = config_of(folder, {"path": "teacher"}).model_dump()
    given["teachers"]["big"]["devices"] = "node0:1"
    run = Config.model_validate(given | {"placement": {"rollout": "node0:2-3", "learner": "node0:0"}})
    monkeypatch.setattr(here, "ask_replay", lambda *_: SimpleNamespace(state={"config": dump(run)}))
    found = here.joined("tcp://127.0.0.1:5757", 2, [])
    assert found.teachers["big"].devices is None and found.shares[0].rollout == (0, 1)
    assert shared_values(found)["teachers.big.path"] == shared_values(run)["teachers.big.path"]
    assert "teachers.big.devices" not in shared_values(run)
