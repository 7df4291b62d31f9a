"""Mixtures of experts on a GPU: grouped products against float64, the compiler, and where the time of layers goes.

`pytest -s tests/gpu/test_moe_cuda.py` prints what it measures. MFU of whole steps, with and without the head:

    python -m scripts.bench learner --shapes 30B-A3B-4L --heats compiled+none,compiled+full --loss-tokens 1
    python -m scripts.bench learner --shapes 30B-A3B-4L --heats compiled+none,compiled+full --max-tokens 65536
"""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from examples import random_qwen3
from learner.policy.flops import flops_of, peak_flops
from learner.policy.memory import Budget
from learner.policy.model import Policy, build_policy
from learner.policy.moe.mixture import Mixture
from scripts.bench.learner import random_policy
from slipstream.families.sizes import Sizes
from tests.learner.tiny_models import SIZES, logprobs, make_config, row_of, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
GPU = torch.device("cuda", 0)
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96, "norm_topk_prob": True}
LARGER = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 512}
LARGER |= {"max_position_embeddings": 1024, **EXPERTS}
KERNELS = {
    "grouped products": ("grouped", "GroupProblem", "group_gemm"),
    "attention": ("flash", "fmha", "attn"),
    "products": ("gemm", "nvjet", "cutlass", "xmma"),
    "sort": ("sort", "Sort", "radix", "Radix"),
    "fused by the compiler": ("triton",),
}
"""Parts of kernels' names, looked at in this order."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield init_device_mesh(GPU.type, (1,))
    finally:
        dist.destroy_process_group()


def layer() -> Mixture:
    torch.manual_seed(0)
    made = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**{**SIZES, **LARGER}))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    mixture = Mixture(made).to(GPU, torch.bfloat16)
    mixture.left = torch.zeros(EXPERTS["num_experts"] + 2, device=GPU)
    return mixture


def dense(wide: Mixture, hidden: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The layer in float64, every expert for every token."""
    probabilities = (hidden @ wide.gate.weight.T).softmax(-1)
    weights = torch.zeros_like(probabilities).scatter(1, experts, probabilities.gather(1, experts))
    weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,eih->tei", hidden, wide.experts.gate_up_proj).chunk(2, -1)
    made = torch.einsum("tei,ehi->teh", torch.nn.functional.silu(gate) * up, wide.experts.down_proj)
    return torch.einsum("teh,te->th", made, weights)


def run(mixture: Mixture, hidden: torch.Tensor, upstream: torch.Tensor) -> list[torch.Tensor]:
    """What is made, and gradients of the input, experts and router."""
    mixture.zero_grad()
    given = hidden.clone().requires_grad_()
    made = mixture(given)
    made.backward(upstream)
    return [made.detach(), given.grad, *(parameter.grad.clone() for parameter in mixture.parameters())]  # type: ignore[union-attr, list-item]


@pytest.mark.parametrize("used", [16, 5])
def test_grouped_products_are_near_float64_and_the_same_twice(used: int) -> None:
    mixture, tokens = layer(), 1024
    hidden, upstream = (torch.randn(tokens, 256, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    mixture.given = torch.stack([torch.randperm(used)[:4] for _ in range(tokens)]).to(GPU)
    found, again = run(mixture, hidden, upstream), run(mixture, hidden, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True)), "the same bits"
    wide, exact = copy.deepcopy(mixture).double(), hidden.double().requires_grad_()
    wide.zero_grad()
    expected = dense(wide, exact, mixture.given)
    expected.backward(upstream.double())
    wanted = [expected, exact.grad, *(parameter.grad for parameter in wide.parameters())]
    names = ["out", "hidden", *(name for name, _ in mixture.named_parameters())]
    for name, one, other in zip(names, found, wanted, strict=True):
        error = float((one.double() - other).norm() / other.norm())
        print(f"{used} experts used, {name}: relative error {error:.2e}")
        assert error < 1e-2, name
    for name, parameter in mixture.experts.named_parameters():
        assert not parameter.grad[used:].any(), f"{name}: an expert without tokens has no gradient"  # type: ignore[index]


def moe_config(folder: Path, **learner: Any) -> Any:
    return make_config(folder, placement={"device": GPU.type}, learner={"compute_dtype": "bfloat16", **learner})


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_layers_are_near_transformers_and_do_not_compile_again(
    tmp_path: Path, mesh: DeviceMesh, recompute: str
) -> None:
    folder = save_model(tmp_path / "model", "qwen3_moe", **LARGER)
    policy = build_policy(moe_config(folder, compile=True, recompute=recompute), mesh, GPU)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(GPU)
    torch._dynamo.utils.counters.clear()
    random = torch.Generator().manual_seed(0)
    for lengths in ((40, 300), (7, 90, 211), (500,), (64, 64, 64, 64)):
        given = [torch.randint(3, 512, (length,), generator=random).tolist() for length in lengths]
        for ids, found in zip(given, logprobs(policy, given), strict=True):
            logits = theirs(torch.tensor([ids], device=GPU)).logits[0, :-1].log_softmax(-1)
            wanted = logits.gather(1, torch.tensor(ids[1:], device=GPU)[:, None])[:, 0]
            assert float((found - wanted).abs().mean()) < 0.03
        policy.forward(row_of(given).to(GPU), 1.0)[0].sum().backward()
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] <= 6, "with and without gradients, and no more for four layers"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tokens", [16_384, 65_536])
@pytest.mark.parametrize("shape", ["30B-A3B-4L"])
def test_where_the_time_of_layers_goes(
    tmp_path: Path, mesh: DeviceMesh, shape: str, tokens: int, recompute: str
) -> None:
    model = random_qwen3.config(shape)
    model.save_pretrained(tmp_path)
    config = moe_config(tmp_path, compile=True, recompute=recompute, max_tokens_per_microbatch=tokens)
    policy = random_policy(config, mesh, GPU, Budget(recompute, keeps_gathered=True, whole_gradients=True))
    length = min(tokens, 2048)
    row = row_of(torch.randint(3, model.vocab_size, (tokens // length, length)).tolist()).to(GPU)
    for _ in range(3):
        step(policy, row)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(5):
        step(policy, row)
    ended.record()
    torch.cuda.synchronize()
    seconds = began.elapsed_time(ended) / 5000
    print(f"{shape}, {tokens} tokens, recompute {recompute}: {seconds * 1e3:.1f} ms, {mfu(model, row, seconds)}")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(policy, row)
        torch.cuda.synchronize()
    for name, share in shares(profile):
        print(f"  {name:<24}{share:6.1%}")


def step(policy: Policy, row: Any) -> None:
    """Forward and backward, the head at one position of each trajectory."""
    import dataclasses

    last = torch.cumsum(row.lengths, 0) - 1
    few = dataclasses.replace(row, kept=row.kept[last], targets=row.targets[last])
    policy.forward(few, 1.0)[0].sum().backward()
    policy.clear_gradients()


def mfu(model: Any, row: Any, seconds: float) -> str:
    import dataclasses

    flops = flops_of(Sizes.of(model.to_dict()), [dataclasses.replace(row, kept=row.kept[: len(row.lengths)])])
    peak = peak_flops(torch.cuda.get_device_name())
    return f"{flops / seconds / 1e12:.0f} TFLOP/s" + (f", MFU {flops / seconds / peak:.1%}" if peak else "")


def shares(profile: Any) -> list[tuple[str, float]]:
    """Of the time of kernels, by what they are; the five longest others by name."""
    spent: Counter[str] = Counter()
    for event in profile.key_averages():
        words = (name for name, parts in KERNELS.items() if any(part in event.key for part in parts))
        spent[next(words, event.key[:60])] += event.self_device_time_total
    whole = sum(spent.values())
    named = [(name, spent[name] / whole) for name in KERNELS]
    return named + [(n, t / whole) for n, t in spent.most_common() if n not in KERNELS][:5]
