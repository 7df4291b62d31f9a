"""Hugging Face folders: read and written as transformers does it, and refusals that name the folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from learner.checkpoints import export
from learner.checkpoints.export import write_hf_folder
from learner.policy.model import Policy, build_policy
from learner.policy.pretrained import PolicyError
from tests.learner.recorded import batch_of, random_step, train_on
from tests.learner.tiny_models import built, logprobs, make_config, save_model

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
def test_logprobs_and_names_are_those_of_transformers(tmp_path, mesh, family, tied, changes):
    save_model(tmp_path, family, tied=tied, **changes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    policy = build(tmp_path, mesh)
    lengths = (5, 2, 13, 8)
    sequences = [torch.randint(1, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    found = logprobs(policy, [ids.tolist() for ids in sequences])
    for ids, values in zip(sequences, found, strict=True):
        with torch.no_grad():
            expected = torch.log_softmax(theirs(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])
        torch.testing.assert_close(values, expected[:, 0], rtol=0, atol=1e-5)
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
    with pytest.raises(PolicyError, match=r"names 'model-00002-of-00002.safetensors', which is not a file"):
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
    refused("has neither model.safetensors nor")
    change_config(folder, model_type="gpt2")
    refused("is a 'gpt2' model, which is not trained: .*; the learner trains llama, qwen2, qwen3, ")
    (folder / "config.json").write_text("{")
    refused("is not readable")
    (folder / "config.json").unlink()
    refused("has no config.json")
    folder.rename(tmp_path / "elsewhere")
    refused("no folder")


SMALL = 50_000


def trained_policy(folder: Path, mesh: DeviceMesh) -> Policy:
    """Weights that differ from those in the folder."""
    config = make_config(folder)
    policy, optimizer = built(config, mesh)
    train_on(batch_of(random_step(1), 1), policy, optimizer, config)
    return policy


@pytest.mark.parametrize(
    ("family", "tied", "dtype", "limit"),
    [
        ("qwen3", True, "float32", SMALL),
        ("qwen3", True, "bfloat16", export.FILE_BYTES),
        ("llama", False, "bfloat16", SMALL),
        ("qwen2", True, "float32", export.FILE_BYTES),
    ],
)
def test_transformers_loads_equal_tensors(tmp_path, mesh, monkeypatch, family, tied, dtype, limit):
    monkeypatch.setattr(export, "FILE_BYTES", limit)
    source, target = save_model(tmp_path / "source", family, tied=tied), tmp_path / "target"
    policy = trained_policy(source, mesh)
    write_hf_folder(policy.layout, policy.shards(), source, target, dtype, policy.group)
    loaded = AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    expected, found = dict(policy.named_full_tensors(dtype)), dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert all(found[n].dtype == expected[n].dtype and torch.equal(found[n], expected[n]) for n in expected)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) is tied
    sizes = {p.name: p.stat().st_size for p in target.glob("*.safetensors")}
    if limit == SMALL:
        assert len(sizes) > 2 and max(sizes.values()) < limit + 10_000  # with the header
    else:
        assert list(sizes) == ["model.safetensors"]
    assert build(target, mesh).shard_digests(dtype) == policy.shard_digests(dtype)


def test_what_belongs_to_the_model_is_taken_over(tmp_path, mesh):
    source, target = save_model(tmp_path / "source"), tmp_path / "target"
    taken = {"tokenizer.json": '{"a": 1}', "chat_template.jinja": "{{ x }}"}
    for name, text in (taken | {"notes.txt": "not part of a model"}).items():
        (source / name).write_text(text)
    taken["generation_config.json"] = (source / "generation_config.json").read_text()
    change_config(source, torch_dtype="float16")
    policy = build(source, mesh)
    write_hf_folder(policy.layout, policy.shards(), source, target, "bfloat16", mesh.get_group())
    assert {name: (target / name).read_text() for name in taken} == taken and not (target / "notes.txt").exists()
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config
