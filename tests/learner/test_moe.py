"""Mixtures of experts against transformers and against a plain loop in float64."""

import copy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from learner.policy import attention
from learner.policy.lora import merged
from learner.policy.meshes import Meshes
from learner.policy.model import TokenModel, build_policy
from learner.policy.moe.mixture import Mixture
from learner.policy.moe.mixtures import Mixtures
from learner.policy.moe.sorting import by_expert
from learner.rows import BatchError, Row
from tests.learner.recorded import batch_of, random_step, train_on
from tests.learner.tiny_models import CPU, SIZES, built, make_config, row_of, save_model

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "intermediate_size": 24}
FAMILIES: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**{**SIZES, **EXPERTS, "norm_topk_prob": True}),
    "sparse": Qwen3MoeConfig(**{**SIZES, **EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2}),
    "olmoe": OlmoeConfig(**{**SIZES, **EXPERTS, "num_key_value_heads": 4}),
}
SEQUENCES = [[5, 9, 3, 7, 11, 2], [8, 4, 6], [20, 21, 22, 23, 24, 25, 26, 27]]


def pair(family: str, aux_coef: float = 0.0) -> tuple[Any, TokenModel, Mixtures]:
    """A model of transformers, and the same weights with mixtures of ours."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    ours = AutoModelForCausalLM.from_config(
        copy.deepcopy(FAMILIES[family]), dtype=torch.float32, attn_implementation=attention.PADDED
    ).eval()
    ours.load_state_dict(theirs.state_dict())
    mixtures = Mixtures.adopt(ours, aux_coef)
    assert mixtures is not None
    assert {name for name, _ in ours.named_parameters()} == {name for name, _ in theirs.named_parameters()}
    return theirs, TokenModel(ours), mixtures


def dense(wide: Mixture, hidden: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What the layer should make, token by token in float64, and its auxiliary loss."""
    probabilities = (hidden @ wide.gate.weight.T).softmax(-1)
    chosen = probabilities.topk(wide.top_k).indices if given is None else given
    weights = probabilities.gather(1, chosen)
    if wide.normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    total, fraction = torch.zeros_like(hidden), torch.zeros(wide.num_experts).double()
    for token in range(len(hidden)):
        for slot, expert in enumerate(chosen[token].tolist()):
            gate, up = (wide.experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            made = wide.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
            total[token] = total[token] + weights[token, slot] * made
            fraction[expert] += 1 / len(hidden)
    return total, wide.num_experts * (fraction * probabilities.mean(0)).sum()


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
@pytest.mark.parametrize("is_given", [False, True])
def test_a_layer_is_the_dense_loop_with_gradients_of_router_experts_and_auxiliary_loss(
    family: str, is_given: bool
) -> None:
    _, _, mixtures = pair(family)
    mixture, hidden = mixtures.by_layer[1], torch.randn(11, 64)
    wide = copy.deepcopy(mixture).double()
    given = torch.stack([torch.randperm(8)[:3] for _ in range(11)]) if is_given else None
    mixture.given, mixture.aux_share, mixture.left = given, torch.tensor(0.5), torch.zeros(10)
    upstream, ours, exact = torch.randn(11, 64), hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    found = mixture(ours)
    expected, aux = dense(wide, exact, given)
    (found * upstream).sum().backward()
    ((expected * upstream.double()).sum() + 0.5 * aux).backward()
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-6, atol=1e-6)
    for (name, mine), (_, other) in zip(mixture.named_parameters(), wide.named_parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None and float(other.grad.abs().max()) > 1e-3, name
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-5, atol=1e-6, msg=name)
    assert float(mixture.left[8]) == pytest.approx(aux.item(), rel=1e-6)
    assert float(mixture.left[:8].sum()) == 11 * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_transformers_and_given_routing_repeats_them(family: str) -> None:
    theirs, ours, mixtures = pair(family)
    row, mixtures.records = row_of(SEQUENCES), True
    mixtures.begin(row)
    with torch.no_grad():
        found, _ = ours(row, 1.0)
        logits = [theirs(input_ids=torch.tensor([one])).logits[0, :-1].log_softmax(-1) for one in SEQUENCES]
    expected = torch.cat(
        [one.gather(1, torch.tensor(ids[1:])[:, None])[:, 0] for one, ids in zip(logits, SEQUENCES, strict=True)]
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    routing = mixtures.chosen.to(torch.uint8)
    assert routing.shape == (17, 2, 3)
    replayed = with_routing(row, routing)
    mixtures.begin(replayed)
    with torch.no_grad():
        assert torch.equal(ours(replayed, 1.0)[0], found)
        mixtures.begin(with_routing(row, (routing + 1) % 8))
        assert float((ours(replayed, 1.0)[0] - found).abs().max()) > 1e-3


def with_routing(row: Row, routing: Tensor) -> Row:
    return replace(row, routing=routing)


def test_routing_of_other_sizes_is_refused() -> None:
    _, _, mixtures = pair("qwen3_moe")
    row = row_of(SEQUENCES)
    for shape in [(16, 2, 3), (17, 1, 3), (17, 2, 2)]:
        with pytest.raises(BatchError, match=r"routing of .* where the row and the model have \(17, 2, 3\)"):
            mixtures.begin(with_routing(row, torch.zeros(shape, dtype=torch.uint8)))


def test_the_auxiliary_loss_is_that_of_transformers_by_layer() -> None:
    theirs, ours, mixtures = pair("qwen3_moe")
    mixtures.begin(row_of(SEQUENCES[:1]))
    with torch.no_grad():
        ours(row_of(SEQUENCES[:1]), 1.0)
        out = theirs(input_ids=torch.tensor(SEQUENCES[:1]), output_router_logits=True)
    expected = [float(load_balancing_loss_func((logits,), 8, 3)) for logits in out.router_logits]
    assert [float(one.left[8]) for one in mixtures.by_layer.values()] == pytest.approx(expected, rel=1e-5)


def test_gradients_of_the_auxiliary_loss_are_those_of_transformers_by_the_share_of_the_row() -> None:
    theirs, ours, mixtures = pair("qwen3_moe", aux_coef=0.5)
    row = row_of(SEQUENCES[:1])
    row = replace(row, weights=torch.full((len(row.kept),), 0.05))
    mixtures.begin(row)
    (0 * ours(row, 1.0)[0].sum()).backward()
    out = theirs(input_ids=torch.tensor(SEQUENCES[:1]), output_router_logits=True)
    losses = [load_balancing_loss_func((logits,), 8, 3) for logits in out.router_logits]
    (0.5 * 0.05 * 5 * torch.stack(losses).mean()).backward()
    for (name, mine), other in zip(ours.transformer.named_parameters(), theirs.parameters(), strict=True):
        if "gate.weight" in name or "embed_tokens" in name or "layers.0.self_attn" in name:
            assert other.grad is not None and float(other.grad.abs().max()) > 1e-6, name
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-8, msg=name)


def test_adapters_of_a_mixture_are_those_of_attention_and_train(tmp_path: Path, mesh: DeviceMesh) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe", **EXPERTS, norm_topk_prob=True)
    config = make_config(folder, learner={"lora": {"rank": 2}, "adam_epsilon": 1e-6})
    policy, optimizer = built(config, mesh)
    names = {name.split(".layers.")[1].split(".lora_")[0] for name, _ in policy.named_parameters()}
    assert names == {f"{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qkvo"}
    before, frozen = policy.parameter_digest(), [shard.local.clone() for shard in policy.frozen()]
    sums, reason = train_on(batch_of(random_step(1), 1), policy, optimizer, config)
    assert not reason and sums.metrics()["moe/max_violation"] > 0 and policy.parameter_digest() != before
    assert all(torch.equal(shard.local, was) for shard, was in zip(policy.frozen(), frozen, strict=True))
    whole = merged(policy.layout, policy.frozen(), policy.shards(), config.learner.lora, policy.group)
    moved = {shard.name for shard, was in zip(whole, frozen, strict=True) if not torch.equal(shard.local, was)}
    assert moved == {f"model.layers.{name}.weight" for name in names}


@pytest.mark.parametrize(("recompute", "products", "attends"), [("none", 0, 0), ("selective", 2, 0), ("full", 2, 1)])
def test_selective_recomputing_keeps_attention_and_no_products_of_experts(
    tmp_path: Path, mesh: DeviceMesh, recompute: str, products: int, attends: int
) -> None:
    """A backward has four products of experts a layer, and those of the forward again."""
    config = make_config(save_model(tmp_path, "qwen3_moe", **EXPERTS), learner={"recompute": recompute})
    policy, _ = built(config, mesh)
    loss = policy.forward(row_of([[3, 4, 5, 6]]), 1.0)[0].sum()
    with Counted() as counted:
        loss.backward()
    layers = policy.model.transformer.config.num_hidden_layers
    assert counted.calls["_grouped_mm"] == (4 + products) * layers
    forwards = (count for name, count in counted.calls.items() if "attention" in name and "backward" not in name)
    assert sum(forwards) == attends * layers


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_experts_that_ranks_divide_are_recomputed_and_compiled_and_change_nothing(
    tmp_path: Path, mesh: DeviceMesh, compiled: bool
) -> None:
    """One rank that divides them among itself. What exchanges tokens breaks a layer's graph, and FSDP lies inside."""
    folder = save_model(tmp_path, "qwen3_moe", **EXPERTS)
    alone, group = init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "expert")), mesh.get_group()
    meshes = Meshes(group, group, mesh, expert=alone["expert"], experts=alone["shard"])
    outcomes, graphs = [], set[int]()
    for recompute in ("none", "selective", "full"):
        dtype = "bfloat16" if compiled else "float32"
        learner = {"recompute": recompute, "compile": compiled, "compute_dtype": dtype}
        policy = build_policy(make_config(folder, learner=learner), meshes, CPU)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        policy.forward(row_of(SEQUENCES), 1.0)[0].sum().backward()
        outcomes.append([gradient.clone() for gradient in policy.local_gradients()])
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(graphs) == 1 and (graphs != {0}) is compiled
    tolerance: dict[str, float] = {"rtol": 2e-2, "atol": 2e-2} if compiled else {"rtol": 0, "atol": 0}
    for found in outcomes[1:]:
        for gradient, expected in zip(found, outcomes[0], strict=True):
            torch.testing.assert_close(gradient, expected, **tolerance)


class Counted(TorchDispatchMode):
    """Calls of operators, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[operator.overloadpacket.__name__] += 1
        return operator(*args, **(kwargs or {}))


def test_choices_are_sorted_by_expert_in_order_of_tokens() -> None:
    order, places, ends = by_expert(torch.tensor([3, 0, 0, 2, 3, 2]), 5)
    assert order.tolist() == [1, 2, 3, 5, 0, 4] and places.tolist() == [4, 0, 1, 2, 5, 3]
    assert ends.tolist() == [2, 2, 4, 6, 6] and ends.dtype == torch.int32
