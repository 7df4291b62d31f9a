"""Before a run starts: whether reward.model.path is a scalar reward model, and what --dry-run says of it."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs import Config, ConfigError
from configs.loading import load
from configs.plan import Machine, assign
from learner.check import checks
from learner.check.model_folders import check_reward_model
from learner.check.model_folders import reward_memory as memory

SETTINGS = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "vocab_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "reward"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(SETTINGS))
    (made / "tokenizer.json").write_text("{}")
    save_file({"score.weight": np.zeros((1, 1024), np.float32)}, made / "model.safetensors")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return made


def config_of(folder: Path, *settings: str) -> Config:
    paths = [f"reward.model.path={folder}", f"data.train={folder.parent}/train.jsonl", "data.eval=null"]
    return load("quickstart", [*paths, "reward.function=model", *settings])


def config_json(**changes: object) -> str:
    return json.dumps(SETTINGS | changes)


def test_a_whole_folder_passes(folder: Path) -> None:
    check_reward_model(config_of(folder))
    check_reward_model(load("quickstart"))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("", None, ["no folder", "with one label"]),
        ("config.json", None, ["config.json is not readable"]),
        ("config.json", "{", ["config.json is not readable"]),
        ("config.json", config_json(architectures=["Qwen2ForCausalLM"]), ["Qwen2ForCausalLM", "no head"]),
        ("config.json", config_json(architectures=None), ["of nothing"]),
        ("config.json", config_json(id2label={"0": "bad", "1": "good"}), ["2 labels", "has 1"]),
        ("config.json", json.dumps({"architectures": SETTINGS["architectures"]}), ["2 labels"]),
        ("model.safetensors", None, ["no *.safetensors", "save_pretrained"]),
        ("model.safetensors", "x" * 20, ["model.safetensors is broken"]),
        ("tokenizer.json", None, ["no tokenizer"]),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused(folder: Path, file: str, content: str | None, words: list[str]) -> None:
    config = config_of(folder if file else folder / "none")
    if content is not None:
        (folder / file).write_text(content)
    elif file:
        (folder / file).unlink()
    with pytest.raises(ConfigError, match=r"^reward\.model\.path: ") as refused:
        check_reward_model(config)
    assert [word for word in words if word not in str(refused.value)] == [], refused.value


def test_chat_messages_need_a_chat_template(folder: Path) -> None:
    chat = json.dumps({"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"})
    (folder.parent / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' + chat + "\n")
    with pytest.raises(ConfigError, match=r"^reward\.model\.chat_template: unset.*prompt 2 of .*train\.jsonl"):
        check_reward_model(config_of(folder))
    with pytest.raises(ConfigError, match=r"^reward\.model\.chat_template: 'none\.jinja' is neither a readable file"):
        check_reward_model(config_of(folder, "reward.model.chat_template=none.jinja"))
    check_reward_model(config_of(folder, "reward.model.chat_template='{{ messages[0].content }}'"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    check_reward_model(config_of(folder))


def test_a_start_looks_where_it_starts_reward_servers(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (finding,) = checks.found(config_of(folder), [checks.reward])
    assert finding.severity == "stop" and "no tokenizer" in finding.what
    assert list(checks.found(config_of(folder, "placement.local_rollouts=false"), [checks.reward])) == []


def save_sparse(file: Path, elements: int) -> None:
    """Float16 zeros that take no room on the disk."""
    header = json.dumps({"score.weight": {"dtype": "F16", "shape": [elements], "data_offsets": [0, 2 * elements]}})
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header.encode())
        stream.truncate(8 + len(header) + 2 * elements)


def test_memory_is_shown_where_reward_servers_have_gpus(folder: Path) -> None:
    on_gpus = ["placement.device=cuda", "placement.split=1:1", "weight_bus.backend=gloo"]

    def shown(*settings: str) -> str:
        config = config_of(folder, *on_gpus, *settings)
        return memory(config, assign(config, {"node0": Machine("127.0.0.1", gpus=8)}, config_file="c.yaml"))

    save_sparse(folder / "model.safetensors", 2**28)
    assert shown() == "", "beside the rollout servers, on the CPU"
    assert shown("placement.reward=node0:2").startswith(
        "memory of reward-0: 0.50 GiB of weights on node0:2; activations"
    )
    both = shown("placement.reward=node0:0", "placement.share_gpus=true", "reward.model.dtype=float32")
    assert "1.00 GiB of weights on node0:0, shared with learner rank 0, rollout-0; activations of up to 16384" in both
