"""Which part of a live tensor holds a tensor of the model's folder, on models as SGLang fuses, slices and pads them."""

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch

from rollout_server.engines.sglang.update import loader
from rollout_server.engines.sglang.update.layout import live_slices
from rollout_server.engines.sglang.update.live import LiveWeights, _covered
from rollout_server.engines.sglang.update.orders import FOLDER as FOLDER_VARIABLE
from rollout_server.engines.sglang.update.orders import StagingFolder
from weight_bus.digest import Part, add, slice_digest, slice_digests

HIDDEN, HEADS, KV_HEADS, HEAD = 8, 4, 2, 4
VOCABULARY, PADDED = 10, 16
MLP = 6


class Qkv(torch.nn.Module):
    """As SGLang's QKVParallelLinear: rows of q, k, v of this rank, KV heads replicated where there are too few."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.tp_rank, self.head_size = rank, HEAD
        self.num_heads, self.num_kv_heads = HEADS // ranks, max(1, KV_HEADS // ranks)
        self.num_kv_head_replicas = max(1, ranks // KV_HEADS)
        self.weight = torch.nn.Parameter(torch.zeros((self.num_heads + 2 * self.num_kv_heads) * HEAD, HIDDEN))


class Model(torch.nn.Module):
    """One layer of everything."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.embed = torch.nn.Module()
        rows = PADDED // ranks
        self.embed.weight = torch.nn.Parameter(torch.zeros(rows, HIDDEN))
        self.embed.shard_indices = SimpleNamespace(
            org_vocab_start_index=min(rank * rows, VOCABULARY), org_vocab_end_index=min((rank + 1) * rows, VOCABULARY)
        )
        self.attn = torch.nn.Module()
        self.attn.qkv_proj = Qkv(rank, ranks)
        self.mlp = torch.nn.Module()
        self.mlp.gate_up_proj = torch.nn.Module()
        self.mlp.gate_up_proj.output_sizes, self.mlp.gate_up_proj.tp_size = [MLP, MLP], ranks
        self.mlp.gate_up_proj.tp_rank = rank
        self.mlp.gate_up_proj.weight = torch.nn.Parameter(torch.zeros(2 * MLP // ranks, HIDDEN))
        self.mlp.down_proj = torch.nn.Module()
        self.mlp.down_proj.input_size_per_partition, self.mlp.down_proj.tp_rank = MLP // ranks, rank
        self.mlp.down_proj.weight = torch.nn.Parameter(torch.zeros(HIDDEN, MLP // ranks))
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.zeros(HIDDEN))


FOLDER = {
    "embed.weight": (VOCABULARY, HIDDEN),
    "attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "mlp.gate_proj.weight": (MLP, HIDDEN),
    "mlp.up_proj.weight": (MLP, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, MLP),
    "norm.weight": (HIDDEN,),
}


def filled(ranks: int) -> tuple[dict[str, torch.Tensor], list[Model]]:
    """A folder's tensors, and the models of all ranks that hold them, written slice by slice."""
    generator = torch.Generator().manual_seed(ranks)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in FOLDER.items()}
    models = [Model(rank, ranks) for rank in range(ranks)]
    for model in models:
        for piece in live_slices(model, FOLDER.items()):
            cut = tuple(slice(first, first + n) for first, n in zip(piece.start, piece.view.shape, strict=True))
            piece.view.copy_(whole[piece.name][cut])
    return whole, models


@pytest.mark.parametrize("ranks", [1, 2])
def test_digests_of_slices_add_up_over_ranks_fusions_and_padding(ranks: int) -> None:
    whole, models = filled(ranks)
    parts: dict[str, dict[tuple[int, ...], int]] = {}
    for model in models:
        for piece in live_slices(model, FOLDER.items()):
            (found,) = slice_digests([Part(piece.view, piece.full_shape, piece.start)])
            parts.setdefault(piece.name, {})[piece.start] = found
    for name, tensor in whole.items():
        assert add(list(parts[name].values())) == slice_digest(tensor), name


def test_kv_heads_with_replicas_begin_at_the_same_place() -> None:
    _, models = filled(4)
    starts = [next(p for p in live_slices(m, FOLDER.items()) if p.name == "attn.k_proj.weight").start for m in models]
    assert starts == [(0, 0), (0, 0), (HEAD, 0), (HEAD, 0)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_parameter_is_covered_but_for_padded_rows(ranks: int) -> None:
    _, models = filled(ranks)
    for model in models:
        assert _covered(model, live_slices(model, FOLDER.items()))


def test_what_an_update_does_not_name_is_not_covered() -> None:
    (model,) = filled(1)[1]
    but_one = [shape for shape in FOLDER.items() if shape[0] != "norm.weight"]
    assert not _covered(model, live_slices(model, but_one))
    half = [shape for shape in FOLDER.items() if shape[0] != "mlp.up_proj.weight"]
    assert not _covered(model, live_slices(model, half)), "half of a fused tensor"
    model.norm.bias = torch.nn.Parameter(torch.zeros(HIDDEN))
    assert not _covered(model, live_slices(model, FOLDER.items()))


def test_slices_are_of_one_model_and_its_tensors() -> None:
    whole, (model,) = filled(1)
    live = LiveWeights(model, FOLDER.items())
    assert live.digests() == [slice_digest(whole[name]) for name in FOLDER]
    assert live.are_of(model, FOLDER.items())
    assert not live.are_of(filled(1)[1][0], FOLDER.items())
    assert not live.are_of(model, list(FOLDER.items())[1:])


class Mover(Model):
    """Loads by making parameters anew, as models do that pack their weights after loading."""

    moves = True

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        whole = dict(tensors)
        for piece in live_slices(self, FOLDER.items()):
            piece.view.copy_(whole[piece.name])
        if self.moves:
            self.norm.weight = torch.nn.Parameter(self.norm.weight.detach().clone())


def test_a_parameter_that_moved_is_refused_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest would be that of memory which captured graphs do not read."""
    staging = StagingFolder()
    monkeypatch.setenv(FOLDER_VARIABLE, str(staging.path))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    whole, model = filled(1)[0], Mover(0, 1)

    def update(version: int) -> str:
        staging.write_update(whole.items())
        loader.apply(model, [])
        return str(staging.replies(1)[0]["error"])

    try:
        model.moves = False
        assert update(1) == ""
        model.moves = True
        assert "parameters of the model have moved, first 'norm.weight'" in update(2)
        model.moves = False
        assert "have moved" in update(3), "its graphs read the old memory for ever"
    finally:
        staging.close()
