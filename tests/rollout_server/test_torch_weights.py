"""Folders, fused live tensors, the inverse map and the digests on it; what is refused, and by which name."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.update.orders import folder_tensors
from rollout_server.engines.torch.family import read_spec
from rollout_server.engines.torch.weights import LiveWeights, read_folder
from tests.rollout_server.torch_oracle import LLAMA3_ROPE, VARIANTS, hf_tensors, load_model, make_model, save_folder
from weight_bus.digest import slice_digest


def read(folder: Path, dtype: torch.dtype = torch.float32, max_context: int = 64) -> LiveWeights:
    spec = read_spec(folder, max_context)
    weights = LiveWeights(spec, dtype)
    weights.load(read_folder(folder, tied=spec.tied, dtype=dtype))
    return weights


def edit_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_digests_of_live_tensors_are_those_of_the_hf_tensors(variant: str, tmp_path: Path) -> None:
    weights = read(save_folder(tmp_path, **VARIANTS[variant]))
    expected = {name: slice_digest(tensor) for name, tensor in hf_tensors(load_model(tmp_path)).items()}
    assert weights.digests() == expected


def test_flipped_live_byte_changes_exactly_the_digest_of_its_tensor(tmp_path: Path) -> None:
    weights = read(save_folder(tmp_path, "qwen2"))
    before = weights.digests()
    for part in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "k_proj.bias"):
        name = f"model.layers.1.self_attn.{part}"
        rows = weights.layout[name]
        for row in (rows.start, rows.start + rows.shape[0] - 1):
            byte = weights.tensors[rows.live][row].view(-1).view(torch.uint8)
            byte[0] ^= 1
            after = weights.digests()
            assert [n for n in before if before[n] != after[n]] == [name], (part, row)
            byte[0] ^= 1


def test_load_takes_any_order_and_keeps_neither_memory_nor_graph(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"attention_bias": True, "tie_word_embeddings": False}
    target, model = read(save_folder(tmp_path, "llama", **sizes)), make_model("llama", seed=9, **sizes)
    expected = {name: slice_digest(tensor) for name, tensor in hf_tensors(model).items()}
    named = list(model.named_parameters())
    for seed in range(10):
        random.Random(seed).shuffle(named)
        for live in target.tensors.values():
            live.zero_()
        target.load(named)
        assert target.digests() == expected
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert target.digests() == expected
    assert not any(tensor.requires_grad for tensor in target.tensors.values())


def wrong_updates() -> dict[str, tuple[Any, str]]:
    q = "model.layers.0.self_attn.q_proj.weight"

    def changed(name: str, tensor: torch.Tensor) -> Any:
        return lambda tensors: [*((n, t) for n, t in tensors.items() if n != name), (name, tensor)]

    return {
        "missing": (lambda t: [(n, v) for n, v in t.items() if n != q], f"1 of 24 tensors are missing.*{q}"),
        "empty": (lambda t: [], "24 of 24 tensors are missing.*model.embed_tokens.weight"),
        "unknown": (changed("model.layers.7.mlp.up_proj.weight", torch.zeros(48, 32)), "layers.7.mlp.*not part of"),
        "twice": (lambda t: [*t.items(), (q, t[q])], f"{q}.*came twice"),
        "transposed": (changed("model.layers.0.mlp.up_proj.weight", torch.zeros(32, 48)), r"up_proj.*\(32, 48\)"),
        "fused shape": (changed(q, torch.zeros(64, 32)), rf"{q}.*\(64, 32\).*\(32, 32\)"),
        "dtype": (changed(q, torch.zeros(32, 32, dtype=torch.bfloat16)), f"{q}.*bfloat16.*float32"),
        "tied head": (changed("lm_head.weight", torch.zeros(40, 32)), "lm_head.weight.*model.embed_tokens.weight"),
    }


@pytest.mark.parametrize("case", wrong_updates())
def test_load_refuses_an_update_that_is_not_exactly_the_model(case: str, tmp_path: Path) -> None:
    weights = read(save_folder(tmp_path))
    change, message = wrong_updates()[case]
    with pytest.raises(EngineError, match=message):
        weights.load(change(hf_tensors(make_model(seed=1))))


def test_sharded_folder_with_index_loads_the_same(tmp_path: Path) -> None:
    model = make_model("qwen2", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert read(tmp_path / "many").digests() == read(tmp_path / "one").digests()


@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_folder_may_repeat_the_embedding_as_lm_head_but_not_contradict_it(differs: bool, tmp_path: Path) -> None:
    file = save_folder(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + float(differs)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, file, metadata={"format": "pt"})
    if not differs:
        read(tmp_path)
        return
    with pytest.raises(EngineError, match=r"tie_word_embeddings is true but lm_head\.weight differs"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"model_type": "glm4"}, "model_type 'glm4'"),
        ("llama", {"model_type": "mistral"}, "model_type 'mistral'"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "layer_types": None}, "sliding_window 32"),
        ("llama", {"max_position_embeddings": 63}, "max_position_embeddings 63 is below the context of 64"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        (
            "llama",
            {"rope_parameters": {**LLAMA3_ROPE, "rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope_type 'longrope'",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5",
        ),
    ],
)
def test_what_cannot_be_served_exactly_is_refused_by_name(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_folder(tmp_path, family, max_window_layers=1) if family == "qwen2" else save_folder(tmp_path, family)
    with pytest.raises(EngineError, match=message):
        read_spec(edit_config(folder, **changes), 64)


def test_folders_without_config_or_safetensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config\.json does not exist"):
        read_spec(tmp_path, 64)
    save_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(EngineError, match=r"neither model\.safetensors"):
        read(tmp_path)


def test_an_index_that_points_outside_the_folder_is_refused(tmp_path: Path) -> None:
    save_folder(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EngineError, match=r"weight_map names '\.\./model\.safetensors'"):
        read(tmp_path / "model")


def test_files_beside_the_model_are_not_its_own_for_either_engine(tmp_path: Path) -> None:
    """Adapters that peft has saved there, or the format of another library: the learner reads the model alone."""
    folder = save_folder(tmp_path / "model")
    names = [name for name, _ in folder_tensors(folder)]
    save_file({"base_model.model.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    assert [name for name, _ in folder_tensors(folder)] == names
    assert [name for name, _ in read_folder(folder, tied=False, dtype=torch.float32)] == names
