"""Reading a Hugging Face folder: the same model as transformers loads, and refusals that name the folder."""

import json
from pathlib import Path

import pytest
import torch
from one_rank import logits
from safetensors.torch import load_file, save_file
from tiny_models import make_config, save_model
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from learner.model import Policy, build_policy
from learner.pretrained import PolicyError

CPU = torch.device("cpu")


def build(folder: Path, mesh: DeviceMesh) -> Policy:
    return build_policy(make_config(folder), mesh, CPU)


@pytest.mark.parametrize(
    ("family", "tied", "changes"),
    [
        ("qwen3", True, {}),
        ("qwen2", False, {}),
        ("llama", False, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path, mesh, family, tied, changes):
    save_model(tmp_path, family, tied=tied, **changes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    ids = torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(0))
    policy = build(tmp_path, mesh)
    assert torch.equal(logits(policy, ids), theirs(input_ids=ids).logits)
    assert [n for n, _ in policy.named_parameters()] == [n for n, _ in theirs.named_parameters()]
    assert ("lm_head.weight" in dict(policy.named_parameters())) is not tied


def test_several_files_with_an_index(tmp_path, mesh):
    expected = load_file(save_model(tmp_path) / "model.safetensors")
    names = sorted(expected)
    parts = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: expected[name] for name in held}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = {shard.name: shard.local for shard in build(tmp_path, mesh).shards()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(PolicyError, match=r"names model-00002-of-00002.safetensors, which is not in"):
        build(tmp_path, mesh)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_refusals_name_the_folder_and_the_reason(tmp_path, mesh):
    folder = save_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    whole = load_file(weights)

    def refused(match: str) -> None:
        with pytest.raises(PolicyError, match=match) as caught:
            build(folder, mesh)
        assert str(folder) in str(caught.value)

    save_file({n: t for n, t in whole.items() if n != "model.norm.weight"}, weights)
    refused("has no tensor 'model.norm.weight'")
    save_file({**whole, "model.extra.weight": torch.zeros(1)}, weights)
    refused("'model.extra.weight', which its config.json does not ask for")
    save_file({**whole, "model.norm.weight": torch.zeros(65)}, weights)
    refused(r"model.norm.weight has shape \(65,\), config.json says \(64,\)")
    weights.write_bytes(b"\x10\0\0\0\0\0\0\0 not a header")
    refused("is not readable")
    weights.unlink()
    refused("has no model.safetensors")
    change_config(folder, use_sliding_window=True)
    refused("use_sliding_window")
    change_config(folder, model_type="gpt2")
    refused("is a 'gpt2' model; the learner trains llama, qwen2, qwen3")
    (folder / "config.json").write_text("{")
    refused("is not readable")
    (folder / "config.json").unlink()
    refused("has no config.json")
    folder.rename(tmp_path / "elsewhere")
    refused("no folder")
