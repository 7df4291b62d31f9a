"""Families of decoders: the logprobs of transformers, alone and packed, with windows longer and shorter than a row."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from configs.base import ConfigError
from learner.checkpoints.export import write_hf_folder
from learner.policy import attention
from learner.policy.model import Policy, build_policy
from learner.policy.pretrained import PolicyError
from slipstream.families.names import Place, held
from slipstream.families.sizes import Sizes
from slipstream.families.table import FAMILIES
from tests.learner.test_prefixes import computed, rows, stand_in, trajectory
from tests.learner.tiny_models import logprobs, make_config, save_model

CPU = torch.device("cpu")
LENGTHS = (5, 2, 23, 8)
SEQUENCES = [
    torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS
]
GEMMA3 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
}
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral, window 4": ("mistral", {"sliding_window": 4, "tied": False}),
    "mistral, window 23": ("mistral", {"sliding_window": 23, "tied": False}),
    "mistral, window 64": ("mistral", {"sliding_window": 64, "tied": False}),
    "gemma3, window 4": ("gemma3_text", {**GEMMA3, "sliding_window": 4}),
    "gemma3, window 64": ("gemma3_text", {**GEMMA3, "sliding_window": 64}),
    "gemma2, window 4, both caps": (
        "gemma2", {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "glm4": ("glm4", {"tied": False}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0, "logits_scaling": 0.4, "residual_multiplier": 0.7, "attention_multiplier": 0.4,
        },
    ),
    "phi3": ("phi3", {"tied": False}),
    "phi3, window 4": ("phi3", {"tied": False, "sliding_window": 4}),
    "olmo2": ("olmo2", {"tied": False}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe, every second layer": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2, "tied": False}),
    "olmoe, clipped": ("olmoe", {**EXPERTS, "intermediate_size": 24, "num_key_value_heads": 4, "clip_qkv": 0.4}),
    "qwen2, window 4": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
}  # fmt: skip


def built(folder: Path, mesh: DeviceMesh, case: str) -> Policy:
    family, changes = CASES[case]
    return build_policy(make_config(save_model(folder, family, **changes)), mesh, CPU)


@pytest.mark.parametrize("case", CASES)
def test_logprobs_are_those_of_transformers_before_and_after_an_export(
    tmp_path: Path, mesh: DeviceMesh, case: str
) -> None:
    policy = built(tmp_path / "first", mesh, case)
    check(policy, tmp_path / "first")
    for shard in policy.shards():
        shard.local.add_(torch.randn(shard.local.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    (tmp_path / "export").mkdir()
    write_hf_folder(policy.layout, policy.shards(), policy.source, tmp_path / "export", "float32", policy.group)
    check(policy, tmp_path / "export")


def check(policy: Policy, folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **EAGER)
    for ids, found in zip(SEQUENCES, logprobs(policy, SEQUENCES), strict=True):
        logits = theirs(torch.tensor([ids])).logits[0, :-1]
        wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(found.double(), wanted.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(found, logprobs(policy, [ids])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kernel", ["padded", "varlen"])
@pytest.mark.parametrize("case", ["gemma3, window 4", "gemma2, window 4, both caps"])
def test_answers_that_share_prompts_have_the_same_logprobs_and_gradients(
    tmp_path: Path, mesh: DeviceMesh, case: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows begin in the prompt, in the answer, and before both."""
    given = [trajectory(range(1, 8), [1] * length, 0, length) for length in (1, 3, 11)]
    given += [trajectory([5], [1] * 6, 1, 20), trajectory(range(14), [1] * 2, 2, 21)]
    given += [trajectory(range(14), [1] * 4, 2, 22)]
    expected, gradients = computed(built(tmp_path, mesh, case), rows(given, False))
    if kernel == "varlen":
        stand_in(monkeypatch, ["window_size", "scale", "enable_gqa"])
    policy = built(tmp_path, mesh, case)
    attentions = {"gemma3": attention.VARLEN if kernel == "varlen" else attention.PADDED, "gemma2": attention.PADDED}
    assert policy.model.transformer.config._attn_implementation == attentions[case[:6]]
    found, others = computed(policy, rows(given, True))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-6)


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"
OWN = """from slipstream.families.record import Family, attention, projections

FAMILY = Family(
    model_type="arcee",
    attention=attention("attention_bias", "attention_bias"),
    mlp=(
        *projections("mlp.up_proj", rows="inner", columns="hidden", bias="mlp_bias"),
        *projections("mlp.down_proj", rows="hidden", columns="inner", bias="mlp_bias"),
    ),
)
"""


def test_a_record_of_the_users_own_is_taken(tmp_path: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of docs/reference/families.md; the learner computes what transformers does."""
    monkeypatch.delitem(FAMILIES, "arcee", raising=False)
    assert OWN in PAGE.read_text(encoding="utf-8")
    folder = save_model(tmp_path / "model", "arcee", tied=False)
    with pytest.raises(PolicyError, match=r"model\.family"):
        build_policy(make_config(folder), mesh, CPU)
    file = tmp_path / "own.py"
    for text, said in (("FAMILY = 1", "has no FAMILY"), ("1 / 0", "ZeroDivisionError"), (OWN, "")):
        file.write_text(text)
        try:
            config = make_config(folder, model={"family": str(file)})
        except ConfigError as error:
            assert said and said in str(error)
    ids = [1, 5, 9, 30, 2, 7]
    (found,) = logprobs(build_policy(config, mesh, CPU), [ids])
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(torch.tensor([ids])).logits[0, :-1]
    wanted = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=0, atol=1e-5)
    holders = {part.holder for part in held(Sizes.of(json.loads((folder / "config.json").read_text())), Place())}
    assert "model.layers.0.mlp.up_proj.weight" in holders and "model.layers.0.self_attn.qkv_proj.weight" in holders
    del FAMILIES["arcee"]
