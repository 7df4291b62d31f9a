"""Records of families against transformers' models on the meta device, and against SGLang's way to divide."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from configs.learner import Lora
from slipstream.families.names import Place, held, inside
from slipstream.families.record import LAYERS
from slipstream.families.refused import REFUSED
from slipstream.families.sizes import Sizes
from slipstream.families.table import FAMILIES, family_of
from weight_bus.adapters import is_adapted

DECODERS = [name for name, family in FAMILIES.items() if not family.text]
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 100, "hidden_size": 64, "pad_token_id": None}
SMALL |= {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
GIVEN: list[dict[str, Any]] = [
    {"num_key_value_heads": 2, "head_dim": 8},
    {"num_key_value_heads": 8, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"num_attention_heads": 32},
]


@pytest.fixture(autouse=True)
def described(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for the learner are held against transformers as well."""
    for name, family in FAMILIES.items():
        monkeypatch.setitem(FAMILIES, name, replace(family, refused=""))


def config_of(family: str, given: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": family, **SMALL, **given}


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("given", GIVEN)
def test_logical_tensors_are_the_blocks_of_transformers_parameters(family: str, given: dict[str, Any]) -> None:
    """Also where config.json leaves keys out; every element of every parameter is of one logical tensor."""
    raw = config_of(family, given)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family].from_dict(raw))
    sizes = Sizes.of({**raw, "tie_word_embeddings": model.config.tie_word_embeddings})
    found = {}
    for name, parameter in model.named_parameters():
        parts = inside(FAMILIES[family], name, tuple(parameter.shape))
        assert sum(math.prod(part.size) for part in parts) == parameter.numel(), name
        assert len({part.at for part in parts}) == len(parts)
        found |= {part.name: part.shape for part in parts}
    assert found == dict(sizes.tensors())
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert sizes.parameters == matrices


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize(("ranks", "expert_ranks"), [(1, 1), (2, 1), (4, 1), (4, 2), (4, 4)])
def test_ranks_of_an_engine_hold_every_element(family: str, ranks: int, expert_ranks: int) -> None:
    """Once, or in replicas that begin at the same place; and no two blocks overlap in a live tensor."""
    sizes = Sizes.of(config_of(family, GIVEN[0]))
    whole = {name: torch.zeros(shape) for name, shape in sizes.tensors()}
    blocks = set()
    for rank in range(ranks):
        live: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        for part in held(sizes, Place(rank, ranks, expert_ranks)):
            blocks.add((part.name, part.start, part.size))
            inside_of = zip(part.start, part.size, part.shape, strict=True)
            assert all(first + count <= whole for first, count, whole in inside_of), part
            assert "_proj.weight" not in part.name or "attn" not in part.name or not part.size[0] % sizes.dims["head"]
            size = (*(1,) * (len(part.at) - len(part.size)), *part.size)
            live.setdefault(part.holder, []).append((part.at, size))
        for name, parts in live.items():
            ends = [tuple(map(sum, zip(at, size, strict=True))) for at, size in parts]
            counts = torch.zeros(*(max(end) for end in zip(*ends, strict=True)))
            for at, size in parts:
                _block(counts, at, size).add_(1)
            assert counts.eq(1).all(), name
    for name, start, size in blocks:
        _block(whole[name], start, size).add_(1)
    assert [name for name, counts in whole.items() if not counts.eq(1).all()] == []


def _block(tensor: torch.Tensor, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))]


@pytest.mark.parametrize("family", DECODERS)
def test_adapters_are_of_every_projection_but_those_of_experts(family: str) -> None:
    sizes, lora = Sizes.of(config_of(family, GIVEN[0])), Lora(rank=3)
    adapted = {name: shape for name, shape in sizes.tensors() if is_adapted(name, lora.projections)}
    assert sizes.adapter_parameters(lora) == 3 * sum(map(sum, adapted.values()))
    assert not any("experts" in name for name in adapted)
    assert {name.split(".")[-2] for name in adapted} == set(sizes.projections)
    matrices = {n: math.prod(shape) for n, shape in sizes.tensors() if len(shape) > 1 and n.startswith(LAYERS)}
    through = sum(size // 2 if ".experts." in name else size for name, size in matrices.items())
    assert sizes.flops(1, 0, 0) == 6 * through, "a token goes through 2 of 4 experts"


def test_every_decoder_of_transformers_has_a_record_or_a_reason() -> None:
    decoders = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert decoders <= FAMILIES.keys() | REFUSED.keys() and not FAMILIES.keys() & REFUSED.keys()
    with pytest.raises(LookupError, match="'mamba' model, which is not trained: its layers carry a state"):
        family_of({"model_type": "mamba"})
