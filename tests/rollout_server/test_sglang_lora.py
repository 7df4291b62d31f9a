"""Adapters in SGLang's schedulers: merged slice by slice over ranks and fusions, proven, without drift."""

import asyncio
from typing import Any

import pytest
import torch
from transformers import Phi3Config

from configs.learner import Lora
from rollout_server.engines.base import EngineError
from rollout_server.engines.sglang.update import adapted as adapted_module
from rollout_server.engines.sglang.update.adapted import AdaptedWeights
from rollout_server.engines.sglang.update.layout import live_slices
from slipstream.families.names import Place, held
from slipstream.families.sizes import Sizes
from tests.rollout_server.sglang_served import Served, check_logprobs, digests, random_model
from tests.rollout_server.test_sglang_requests import FOLDER, NORM, UP, Model, cut_of, filled
from tests.rollout_server.test_torch_lora import ALL, adapters_of, merged
from weight_bus.adapters import SCALE, is_adapted, names_of, scale_digest
from weight_bus.digest import add, slice_digest

LORA = Lora(rank=2, alpha=3.0, targets=["k_proj", "up_proj", "down_proj"])
ORDER = {"rank": 2, "scale": 1.5, "projections": list(LORA.projections)}
Tensors = dict[str, torch.Tensor]


def update(seed: int) -> Tensors:
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in ((n, s) for n, s in FOLDER.items() if is_adapted(n, LORA.projections)):
        a, b = names_of(name)
        made[a], made[b] = torch.randn(2, inputs, generator=generator), torch.randn(outputs, 2, generator=generator)
    return made


def held_by(models: list[AdaptedWeights]) -> dict[str, int]:
    """Over all ranks, as StagingFolder adds up what schedulers say."""
    parts: dict[str, dict[tuple[int, ...], int]] = {}
    for model in models:
        for name, start, _, digest in model.digests():
            assert parts.setdefault(name, {}).setdefault(start, digest) == digest, "replicas are equal"
    return {name: add(list(slices.values())) for name, slices in parts.items()}


def live_piece(model: Model, name: str) -> torch.Tensor:
    return next(piece.view for piece in live_slices(model, FOLDER.items()) if piece.name == name)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_merges_its_slices_and_nothing_drifts(ranks: int) -> None:
    whole, models = filled(ranks)
    adapted = [AdaptedWeights(model, FOLDER.items(), ORDER) for model in models]
    base = {name: slice_digest(tensor) for name, tensor in whole.items()}
    assert held_by(adapted) == base | {SCALE: scale_digest(1.5)}
    for seed in range(5):
        adapters = update(seed)
        for each in adapted:
            each.load(list(adapters.items()))
        assert held_by(adapted) == base | {n: slice_digest(t) for n, t in adapters.items()} | {SCALE: scale_digest(1.5)}
        for model in models:
            for piece in live_slices(model, FOLDER.items()):
                a, b = names_of(piece.name)
                right = whole[piece.name] + (1.5 * adapters[b] @ adapters[a] if a in adapters else 0.0)
                assert torch.allclose(piece.view, cut_of({piece.name: right}, piece), atol=1e-6), piece.name
    for each in adapted:
        each.load([(name, torch.zeros_like(tensor)) for name, tensor in adapters.items()])
    for model in models:
        for piece in live_slices(model, FOLDER.items()):
            assert torch.equal(piece.view, cut_of(whole, piece)), "to the bit what it was"


class Live(torch.nn.Module):
    """Live tensors of any family, as its record says that SGLang has them on a rank."""

    def __init__(self, sizes: Sizes, config: Any, rank: int, ranks: int) -> None:
        super().__init__()
        self.config, self.tp_rank, self.tp_size = config, rank, ranks
        ends: dict[str, tuple[int, ...]] = {}
        for part in held(sizes, Place(rank, ranks)):
            end = [first + size for first, size in zip(part.at, part.size, strict=True)]
            ends[part.holder] = tuple(map(max, end, ends.get(part.holder, end)))
        self.live = {name: torch.nn.Parameter(torch.zeros(end)) for name, end in ends.items()}

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self.live.items())


@pytest.mark.parametrize("ranks", [1, 2])
def test_projections_that_a_checkpoint_has_fused_are_merged_block_by_block(ranks: int) -> None:
    config = Phi3Config(
        hidden_size=8,
        intermediate_size=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=16,
        num_hidden_layers=1,
        pad_token_id=0,
    )
    sizes = Sizes.of(config.to_dict())
    shapes, lora = dict(sizes.tensors()), ORDER | {"projections": ["qkv_proj", "gate_up_proj"]}
    fused = [name for name in shapes if is_adapted(name, lora["projections"])]
    adapters = {
        name: torch.randn(shape)
        for weight in fused
        for name, shape in zip(names_of(weight), ((2, 8), (shapes[weight][0], 2)), strict=True)
    }
    adapted = []
    for rank in range(ranks):
        model = Live(sizes, config, rank, ranks)
        adapted.append(AdaptedWeights(model, shapes.items(), lora))
        adapted[-1].load(list(adapters.items()))
        for piece in live_slices(model, shapes.items()):
            a, b = names_of(piece.name)
            right = 1.5 * adapters[b] @ adapters[a] if piece.name in fused else torch.zeros(piece.full_shape)
            assert torch.allclose(piece.view, cut_of({piece.name: right}, piece), atol=1e-6), piece.name
    zeros = {name: slice_digest(torch.zeros(shape)) for name, shape in shapes.items()}
    assert len(fused) == 2 and zeros.items() <= held_by(adapted).items()


def test_a_live_weight_a_kept_copy_and_an_adapter_that_changed_are_found_by_name() -> None:
    _, (model,) = filled(1)
    adapted, name = AdaptedWeights(model, FOLDER.items(), ORDER), UP
    adapted.load(list(update(1).items()))
    before = held_by([adapted])

    def differ() -> list[str]:
        found = held_by([adapted])
        return [n for n in before if found[n] != before[n]]

    live = live_piece(model, name)
    kept = live.clone()
    live[3, 1] += 1
    assert differ() == [name]
    live.copy_(adapted._kept[name, (0, 0)])  # as if it had not been merged at all
    assert differ() == [name]
    live.copy_(kept)
    assert differ() == []
    a, _ = names_of(name)
    adapted._adapters[a][0, 0] += 1
    assert differ() == [a]
    adapted.load(list(update(1).items()))
    adapted._kept[name, (0, 0)][0, 0] += 1
    adapted.load(list(update(1).items()))
    assert differ() == [name]


def test_adapters_in_host_memory_are_merged_on_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged over gloo they are in host memory, for a rank above 0 on another GPU. `meta` stands for the model's."""
    monkeypatch.setattr(adapted_module, "slice_digests", lambda parts: [0 for _ in parts])
    monkeypatch.setattr(adapted_module, "slice_digest", lambda *part: 0)
    monkeypatch.setattr(adapted_module, "_on_host", lambda view: torch.empty(view.shape))
    adapted = AdaptedWeights(Model(0, 1).to("meta"), FOLDER.items(), ORDER)
    adapted.load(list(update(1).items()))
    assert {tensor.device.type for tensor in adapted._adapters.values()} == {"meta"}


def test_an_update_that_is_not_these_adapters_touches_nothing() -> None:
    whole, (model,) = filled(1)
    adapted, adapters = AdaptedWeights(model, FOLDER.items(), ORDER), update(1)
    a, _ = names_of(UP)
    for wrong in (
        {n: t for n, t in adapters.items() if n != a},
        adapters | {a: torch.zeros(3, 8)},
        adapters | {NORM: whole[NORM]},
    ):
        with pytest.raises(ValueError, match=r"the update has .*, learner\.lora means .* here"):
            adapted.load(list(wrong.items()))
    assert torch.equal(live_piece(model, UP), whole[UP])


async def test_a_real_sglang_decodes_with_what_adapters_make_of_its_weights(served: Served) -> None:
    """Its present weights stand for the folder's; afterwards it goes back to whole updates."""
    engine, base = served.engine, served.model
    tensors = [(name, tuple(tensor.shape)) for name, tensor in base.named_parameters()]
    engine._staging.adapt(tensors, ALL)
    try:
        assert await engine.digest() == {**digests(base), SCALE: scale_digest(ALL.scale)}
        for seed in (1, 2):
            adapters = adapters_of(base, ALL, seed)
            await engine.pause("keep_kv")
            await engine.load(iter(adapters.items()), served.version + seed)
            expected = digests(base) | {name: slice_digest(tensor) for name, tensor in adapters.items()}
            assert await engine.digest() == {**expected, SCALE: scale_digest(ALL.scale)}
            await engine.resume()
            (answer,) = await served.sample([5, 6, 7])
            assert set(answer.versions) == {served.version + seed}
            check_logprobs(merged(copy_of(base), ALL, adapters), [5, 6, 7], answer)
        await engine.pause("keep_kv")
        with pytest.raises(EngineError, match=r"learner\.lora means"):
            await engine.load(iter(list(adapters.items())[1:]), served.version + 3)
    finally:
        engine._staging._base, engine._staging._lora = [], {}
        await asyncio.sleep(0)
        await served.update(4, "keep_kv", version=served.version + 4)


def copy_of(model: Any) -> Any:
    twin = random_model(0)
    twin.load_state_dict(model.state_dict())
    return twin
