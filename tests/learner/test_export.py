"""The exported folder loads in transformers with equal tensors."""

import json
from pathlib import Path

import pytest
import torch
from one_rank import built
from recorded import batch_of, random_step, train_on
from tiny_models import make_config, save_model
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from learner import export
from learner.export import plan_files, write_hf_folder
from learner.model import Policy, build_policy

SMALL = 50_000


def trained_policy(folder: Path, mesh: DeviceMesh) -> Policy:
    """Weights that differ from those in the folder."""
    config = make_config(folder, replay={"async_lag": 2})
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
def test_transformers_loads_equal_tensors(tmp_path, mesh, monkeypatch, *, family, tied, dtype, limit):
    monkeypatch.setattr(export, "FILE_BYTES", limit)
    source, target = save_model(tmp_path / "source", family, tied=tied), tmp_path / "target"
    policy = trained_policy(source, mesh)
    write_hf_folder(policy, source, target, dtype)
    loaded = AutoModelForCausalLM.from_pretrained(target, local_files_only=True)
    expected = dict(policy.named_full_tensors(dtype))
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert all(found[n].dtype == expected[n].dtype and torch.equal(found[n], expected[n]) for n in expected)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) is tied
    files = sorted(p.name for p in target.glob("*.safetensors"))
    if limit == SMALL:
        assert len(files) > 2
        assert all((target / file).stat().st_size < limit + 10_000 for file in files)  # with the header
    else:
        assert files == ["model.safetensors"]
    again = build_policy(make_config(target), mesh, torch.device("cpu"))
    assert again.shard_digests(dtype) == policy.shard_digests(dtype)


def test_what_belongs_to_the_model_is_taken_over(tmp_path, mesh):
    source, target = save_model(tmp_path / "source"), tmp_path / "target"
    (source / "tokenizer.json").write_text('{"a": 1}')
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "config.json").write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | {"torch_dtype": "float16"})
    )
    (source / "notes.txt").write_text("not part of a model")
    write_hf_folder(trained_policy(source, mesh), source, target, "bfloat16")
    assert (target / "tokenizer.json").read_text() == '{"a": 1}'
    assert (target / "chat_template.jinja").read_text() == "{{ x }}"
    assert (target / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    assert not (target / "notes.txt").exists()
    config = json.loads((target / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "torch_dtype" not in config


def test_files_are_filled_in_order_and_never_past_the_limit(monkeypatch):
    layout = [("a", "float32", (10,)), ("b", "float32", (5,)), ("c", "float32", (100,)), ("d", "bfloat16", (2,))]
    assert plan_files(layout) == {"model.safetensors": ["a", "b", "c", "d"]}
    monkeypatch.setattr(export, "FILE_BYTES", 60)
    assert plan_files(layout) == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c"],
        "model-00003-of-00003.safetensors": ["d"],
    }
