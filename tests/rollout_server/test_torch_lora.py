"""Adapters in the torch engine: what it answers, what it digests, what it refuses, what a pin costs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.learner import Lora
from rollout_server.engines.base import EngineError
from rollout_server.engines.torch.family import read_spec
from rollout_server.engines.torch.weights import LiveWeights, read_folder
from tests.rollout_server.torch_oracle import (
    VARIANTS,
    error,
    hf_tensors,
    load_model,
    logprobs_of,
    make_model,
    save_folder,
)
from tests.rollout_server.torch_served import PROMPT, sample, serving
from weight_bus.adapters import SCALE, is_adapted, names_of, scale_digest
from weight_bus.digest import slice_digest

ALL = Lora(rank=3, alpha=4.5)
SOME = Lora(rank=2, alpha=3.0, targets=["v_proj", "o_proj", "up_proj"])
Tensors = dict[str, torch.Tensor]


def adapters_of(model: Any, lora: Lora, seed: int) -> Tensors:
    """Random adapters by peft's names, large enough to be seen in every logprob."""
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, weight in hf_tensors(model).items():
        if is_adapted(name, lora.projections):
            shapes = ((lora.rank, weight.shape[1]), (weight.shape[0], lora.rank))
            made |= {n: 0.1 * torch.randn(s, generator=generator) for n, s in zip(names_of(name), shapes, strict=True)}
    return made


def merged(model: Any, lora: Lora, adapters: Tensors) -> Any:
    """The model with W + s B A in place of W."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            a, b = names_of(name)
            if a in adapters:
                weight += lora.scale * adapters[b] @ adapters[a]
    return model


def live(folder: Path, lora: Lora) -> LiveWeights:
    spec = read_spec(folder, 64)
    weights = LiveWeights(spec, torch.float32, lora)
    weights.fill(read_folder(folder, tied=spec.tied, dtype=torch.float32))
    return weights


@pytest.mark.parametrize("variant", ["qwen3-tied", "qwen2-untied", "llama-tied-all-biases"])
async def test_answers_are_those_of_the_merged_model_under_every_update(variant: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, **VARIANTS[variant])
    for lora in (ALL, SOME):
        async with serving(folder, lora=lora) as engine:
            (first,) = await sample(engine, PROMPT, "before")
            assert error(first, logprobs_of(load_model(folder), PROMPT, first)) <= 1e-5, "zero at first"
            for version in (1, 2):
                adapters = adapters_of(load_model(folder), lora, version)
                await engine.pause("drain")
                await engine.load(adapters.items(), version)
                await engine.resume()
                right = merged(load_model(folder), lora, adapters)
                for answer in await sample(engine, PROMPT, f"v{version}", 3):
                    assert set(answer.versions) == {version}
                    assert error(answer, logprobs_of(right, PROMPT, answer)) <= 1e-5
                    assert error(answer, logprobs_of(load_model(folder), PROMPT, answer)) > 1e-3


def test_digests_are_of_base_and_adapters_and_of_what_is_multiplied_with(folder: Path, old: Any) -> None:
    weights, adapters = live(folder, ALL), adapters_of(old, ALL, 1)
    weights.load(adapters.items())
    expected = {name: slice_digest(tensor) for name, tensor in (hf_tensors(old) | adapters).items()}
    expected[SCALE] = scale_digest(1.5)
    assert weights.digests() == expected
    layer = weights.layers[1]
    assert {name: len(own) for name, own in layer.adapters.items()} == {"qkv": 3, "o": 1, "gate_up": 2, "down": 1}
    changed = {
        "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight": layer.adapters["qkv"][1].b,
        "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight": layer.adapters["gate_up"][1].a,
        "model.layers.1.self_attn.q_proj.weight": layer["qkv"],
    }
    for name, tensor in changed.items():
        byte = tensor.view(-1).view(torch.uint8)
        byte[0] ^= 1
        found = weights.digests()
        assert [n for n in found if found[n] != expected[n]] == [name]
        byte[0] ^= 1


def test_a_copy_shares_the_base_and_keeps_its_adapters(folder: Path, old: Any) -> None:
    weights = live(folder, SOME)
    weights.load(adapters_of(old, SOME, 1).items())
    twin, before = weights.copy(), weights.digests()
    weights.load(adapters_of(old, SOME, 2).items())
    assert twin.digests() == before != weights.digests()
    assert twin.embed.data_ptr() == weights.embed.data_ptr()


def test_what_is_not_an_update_of_these_adapters_is_refused_by_name(folder: Path, old: Any) -> None:
    adapters = adapters_of(old, SOME, 1)
    first = next(iter(adapters))
    cases: list[tuple[Lora | None, Tensors, str]] = [
        (
            SOME,
            hf_tensors(make_model(seed=1)),
            r"embed_tokens.* \(learner.lora.rank is 2 here, so updates are adapters\)",
        ),
        (
            SOME,
            {n: t for n, t in adapters.items() if n != first},
            f"1 of 12 tensors are missing, the first is '{first}'",
        ),
        (SOME, adapters_of(old, ALL, 1), "q_proj.lora_A.* set learner.lora here as the learner has it"),
        (SOME, adapters | {first: torch.zeros(3, 32)}, r"v_proj.lora_A.* has shape \(3, 32\), the model has \(2, 32\)"),
        (None, adapters, "lora_A.* is not part of this qwen3 model .an adapter; set learner.lora here"),
    ]
    for lora, update, words in cases:
        weights = live(folder, lora) if lora is not None else LiveWeights(read_spec(folder, 64), torch.float32)
        with pytest.raises(EngineError, match=words):
            weights.load(update.items())
