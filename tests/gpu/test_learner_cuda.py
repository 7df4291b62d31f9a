"""The learner on a GPU: torch's kernel for unpadded rows, bfloat16 FSDP2, memory, and two ranks over NCCL."""

import gc
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1] / "learner"))

from configs import Config
from learner.checkpoints.parts import HostMemory, Tensors
from learner.objective import Objective
from learner.policy import attention
from learner.policy.logprobs import CHUNK_BYTES, head_logprobs
from learner.policy.model import Policy, build_policy
from learner.prefixes import lay_side_by_side
from learner.step import accumulate_gradients, take_peak_bytes
from tests.learner.recorded import batch_of, random_step, rows_of, train_on
from tests.learner.reference import Recorded
from tests.learner.tiny_models import built, make_config, save_model
from tests.support.ranks import two_ranks
from tests.support.runs import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LARGER = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1000}
LARGER |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A group of one rank, over NCCL and for comparison on the CPU over gloo."""
    torch.cuda.set_device(GPU)
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen3"), **LARGER)


def configured(folder: Path, mode: str, dtype: str, **learner: Any) -> Config:
    return make_config(
        folder,
        replay={"async_lag": 2},
        rollout={"dtype": "float32"},
        placement={"device": "cuda"},
        learner={"attention": mode, "compute_dtype": dtype, "adam_epsilon": 1e-6, **learner},
    )


def logprobs_and_gradients(
    config: Config, policy: Policy, trajectories: list[Recorded] | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Logprobs of all tokens in the loss in order, the whole gradient as one vector, and the measurements."""
    batch = batch_of(trajectories or random_step(1, vocab=1000), 1, num_microbatches=2)
    rows, tokens = rows_of(batch, config)
    with torch.no_grad():
        found = [policy.forward(row.to(policy.device), 1.0)[0] for row in rows]
    sums = accumulate_gradients(policy, rows, Objective(config.algorithm), temperature=1.0, global_tokens=tokens)
    return torch.cat(found), torch.cat([g.flatten() for g in policy.local_gradients()]), sums.metrics()


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=0))


SHAPES = [(8, 8, 64, {}), (16, 8, 128, {}), (4, 1, 16, {}), (4, 1, 256, {"sliding_window": 16, "scaling": 0.05})]
"""Heads, those of keys, their size, and what a family asks for besides."""


@pytest.mark.parametrize(("heads", "kv_heads", "size", "asked"), SHAPES)
def test_the_kernel_is_causal_within_each_trajectory(heads: int, kv_heads: int, size: int, asked: Any) -> None:
    torch.manual_seed(0)
    lengths = [1, 300, 17, 64, 129]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=GPU)
    total = sum(lengths)
    shapes = [(1, heads, total, size), (1, kv_heads, total, size), (1, kv_heads, total, size)]
    drawn = [torch.randn(shape, device=GPU) for shape in shapes]
    upstream = torch.randn(1, total, heads, size, device=GPU)
    outcomes = []
    for dtype, attend in ((torch.float32, attention._padded), (torch.bfloat16, attention.make_varlen())):
        inputs = [t.bfloat16().to(dtype).requires_grad_() for t in drawn]
        given = {"cu_seq_lens_q": starts, "max_length_q": max(lengths), "scaling": size**-0.5} | asked
        out, _ = attend(None, *inputs, None, dropout=0.0, **given)
        out.backward(upstream.to(dtype))
        outcomes.append([out.detach().float(), *(t.grad.float() for t in inputs if t.grad is not None)])
    for expected, found in zip(*outcomes, strict=True):
        assert cosine(found.flatten(), expected.flatten()) > 0.9999
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "asked"), SHAPES)
def test_the_kernel_lets_an_answer_see_its_shared_prompt(heads: int, kv_heads: int, size: int, asked: Any) -> None:
    """Its causal mask is aligned to the last query and key where there are more keys than queries."""
    torch.manual_seed(0)
    prompts, answers = (200, 200, 1, 200, 7), (1, 300, 17, 129, 64)
    pieces = [np.r_[np.full(prompt, prompt), np.zeros(n)].astype(np.int32)
              for prompt, n in zip(prompts, answers, strict=True)]  # fmt: skip
    laid = lay_side_by_side(pieces, prompts, wanted=True)
    assert laid.prefixes is not None and laid.saved == 400
    given = {
        "cu_seq_lens_q": torch.from_numpy(laid.starts.astype(np.int32)).to(GPU),
        "max_length_q": laid.longest,
        "prefixes": laid.prefixes.to(GPU),
        "scaling": size**-0.5,
        **asked,
    }
    drawn = [torch.randn((1, n, len(laid.ids), size), device=GPU) for n in (heads, kv_heads, kv_heads)]
    upstream = torch.randn(1, len(laid.ids), heads, size, device=GPU)
    outcomes = []
    for dtype, attend in ((torch.float32, attention._padded), (torch.bfloat16, attention.make_varlen())):
        inputs = [t.bfloat16().to(dtype).requires_grad_() for t in drawn]
        out, _ = attend(None, *inputs, None, dropout=0.0, **given)
        out.backward(upstream.to(dtype))
        outcomes.append([out.detach().float(), *(t.grad.float() for t in inputs if t.grad is not None)])
    for expected, found in zip(*outcomes, strict=True):
        assert cosine(found.flatten(), expected.flatten()) > 0.9999
        torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("changes", [{}, {"recompute": "selective"}, {"compile": True, "recompute": "full"}], ids=str)
def test_shared_prompts_in_bfloat16_are_as_near_to_float32_as_prompts_apart(
    folder: Path, mesh: DeviceMesh, changes: dict[str, Any]
) -> None:
    """The sum over the answers is as exact as that over tokens: gradients of copies are added up in float32."""
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(0, 1000, length).tolist() for length in (300, 90, 1, 160)]
    given = [replace(t, prompt_ids=prompts[t.group]) for t in random_step(1, vocab=1000, group_size=8)]
    exact = configured(folder, "sdpa", "float32", share_prefixes=False)
    expected, gradient, _ = logprobs_and_gradients(exact, build_policy(exact, mesh, GPU), given)
    errors = {}
    for share in (False, True):
        config = configured(folder, "auto", "bfloat16", share_prefixes=share, **changes)
        policy = build_policy(config, mesh, GPU)
        assert policy.model.transformer.config._attn_implementation == attention.VARLEN
        found, other, metrics = logprobs_and_gradients(config, policy, given)
        assert bool(metrics.get("perf/prefix_tokens_saved")) is share
        errors[share] = (float((found - expected).abs().mean()), 1 - cosine(other, gradient))
    for apart, shared in zip(errors[False], errors[True], strict=True):
        assert shared <= 1.3 * apart, errors


def test_bfloat16_without_padding_is_near_float32_with_padding(folder: Path, mesh: DeviceMesh) -> None:
    exact = configured(folder, "sdpa", "float32")
    expected, gradient, measured = logprobs_and_gradients(exact, build_policy(exact, mesh, GPU))
    for mode in ("auto", "sdpa"):
        config = configured(folder, mode, "bfloat16")
        policy = build_policy(config, mesh, GPU)
        chosen = policy.model.transformer.config._attn_implementation
        assert chosen == (attention.VARLEN if mode == "auto" else attention.PADDED)
        found, other, metrics = logprobs_and_gradients(config, policy)
        assert float((found - expected).abs().mean()) < 0.03, mode
        assert cosine(other, gradient) > 0.995, mode
        assert metrics["actor/entropy"] == pytest.approx(measured["actor/entropy"], rel=1e-2), mode
        assert metrics["training/loss_tokens"] == measured["training/loss_tokens"]


def test_float32_without_padding_is_float32_with_padding_and_that_of_a_cpu(folder: Path, mesh: DeviceMesh) -> None:
    outcomes = []
    on_cpu = init_device_mesh("cpu", (1,))
    for mode, over, device in (("sdpa", on_cpu, CPU), ("sdpa", mesh, GPU), ("varlen", mesh, GPU)):
        config = configured(folder, mode, "float32")
        found, gradient, _ = logprobs_and_gradients(config, build_policy(config, over, device))
        outcomes.append((found.cpu(), gradient.cpu()))
    for found, gradient in outcomes[1:]:
        torch.testing.assert_close(found, outcomes[0][0], rtol=0, atol=1e-4)
        torch.testing.assert_close(gradient, outcomes[0][1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"recompute": "selective"}, {"recompute": "full"}, {"compile": True, "recompute": "selective"}], ids=str
)
def test_recomputing_and_compiling_do_not_change_the_gradient(
    folder: Path, mesh: DeviceMesh, changes: dict[str, Any]
) -> None:
    outcomes = []
    torch._dynamo.utils.counters.clear()
    for learner in ({}, changes):
        config = configured(folder, "auto", "bfloat16", **learner)
        policy = build_policy(config, mesh, GPU)
        _, gradient, _ = logprobs_and_gradients(config, policy)
        outcomes.append((gradient, [name for name, _ in policy.named_parameters()]))
    assert cosine(outcomes[0][0], outcomes[1][0]) > (0.999 if "compile" in changes else 0.9999)
    assert outcomes[0][1] == outcomes[1][1]
    assert not torch._dynamo.utils.counters["graph_break"], "a layer is one graph"


def test_steps_lower_the_loss_and_report_memory(folder: Path, mesh: DeviceMesh) -> None:
    config = configured(folder, "auto", "bfloat16", max_grad_norm=10.0)
    policy, optimizer = built(config, mesh, GPU)
    digests = [policy.parameter_digest()]
    for step in range(1, 4):
        batch = batch_of(random_step(step, vocab=1000), step, num_microbatches=3)
        sums, reason = train_on(batch, policy, optimizer, config)
        assert not reason
        assert 0 < sums.metrics()["perf/max_memory_allocated_gb"] < 10
        digests.append(policy.parameter_digest())
    assert len(set(digests)) == len(digests) and optimizer.num_steps == 3
    assert {p.dtype for _, p in policy.named_parameters()} == {torch.float32}


def test_loading_takes_the_memory_of_the_weights_and_no_more(tmp_path: Path, mesh: DeviceMesh) -> None:
    save_model(tmp_path, **{**LARGER, "hidden_size": 1024, "vocab_size": 50_000})
    config = configured(tmp_path, "auto", "bfloat16")
    gc.collect()  # what earlier tests left must not be freed in between
    take_peak_bytes(GPU)
    before = torch.cuda.memory_allocated(GPU)
    policy = build_policy(config, mesh, GPU)
    grown = take_peak_bytes(GPU) - before
    whole = sum(shard.numel * 4 for shard in policy.shards())
    assert whole <= grown <= 1.05 * whole + 64 * 1024**2
    digest, on_cpu = policy.parameter_digest(), init_device_mesh("cpu", (1,))
    assert digest == build_policy(configured(tmp_path, "sdpa", "float32"), on_cpu, CPU).parameter_digest()


def test_a_copy_for_a_checkpoint_is_whole_where_a_rank_has_no_rows_of_the_first_tensor() -> None:
    """As of an adapter with fewer rows than there are ranks."""
    none, large = torch.empty((0, 4), device=GPU), torch.zeros((8192, 8192), device=GPU)
    weights = {"a": none, "b": large}
    memory, product = HostMemory(), torch.ones_like(large)
    memory.copy(Tensors(weights, {}, 0))
    for _ in range(20):
        product = product @ product / 8192
    large.copy_(product)  # behind the products
    assert bool((memory.copy(Tensors(weights, {}, 0)).weights["b"] == 1).all())


def test_the_memory_of_the_output_head_is_that_of_a_chunk() -> None:
    """Not of tokens times vocabulary: twice as many tokens need no more, but for what they are themselves."""
    vocab, hidden_size = 151_936, 256
    weight = torch.randn(vocab, hidden_size, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    needed = []
    for tokens in (8192, 16_384):
        hidden = torch.randn(tokens, hidden_size, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, vocab, (tokens,), device=GPU)
        take_peak_bytes(GPU)
        before = torch.cuda.memory_allocated(GPU)
        head_logprobs(hidden, weight, targets, 1.0)[0].sum().backward()
        needed.append(take_peak_bytes(GPU) - before)
        weight.grad = None
    weights_bytes = vocab * hidden_size * (4 + 2)
    assert needed[0] < 3 * CHUNK_BYTES + weights_bytes < tokens * vocab * 4
    assert needed[1] - needed[0] < 0.05 * needed[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kernels_of_the_head_are_near_float64(temperature: float) -> None:
    """Large logits, as trained models have: products rounded to bfloat16 would be off by 0.02 and more."""
    torch.manual_seed(0)
    tokens, vocab, size = 777, 50_021, 128
    hidden = (torch.randn(tokens, size, device=GPU) * 3).bfloat16().requires_grad_()
    weight = torch.randn(vocab, size, device=GPU).bfloat16().requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=GPU)
    upstream = torch.randn(2, tokens, device=GPU)
    found = head_logprobs(hidden, weight, targets, temperature)
    torch.autograd.backward(found, list(upstream))
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    log_p = torch.log_softmax(exact_hidden @ exact_weight.T / temperature, -1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    torch.autograd.backward(expected, list(upstream.double()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-3)
    for given, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert given.grad is not None and exact.grad is not None
        assert cosine(given.grad.flatten(), exact.grad.flatten()) > 0.9999


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks saw, started as the launcher starts them."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, torch finds {torch.cuda.device_count()}")
    folder = tmp_path_factory.mktemp("two_gpus")
    save_model(folder / "model", "qwen3", tied=True, vocab_size=65, intermediate_size=191)
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = Path(__file__).with_name("learner_cuda_rank.py")
    return two_ranks(program, folder, lambda rank: where | {"LOCAL_RANK": str(rank)}, deadline_s=150, forks=False)


def test_two_ranks_train_digest_and_resume_over_nccl(seen: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(seen):
        assert found["device"] == f"cuda:{rank}" and found["attention"] == attention.VARLEN
        assert found["digests_equal_float32"] and found["digests_equal_bfloat16"]
        assert found["resumed"] == [found["saved"], 3, 3]
    assert seen[0]["steps"] == seen[1]["steps"] and seen[0]["saved"] == seen[1]["saved"]


def test_gradients_summed_after_each_microbatch_over_nccl(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert found["sharded"]["early"] == [False, True]
        assert found["sharded"]["difference"] <= 2e-2 * found["sharded"]["largest"]  # the backward rounds to bfloat16


def test_numbers_of_a_step_are_finite(seen: list[dict[str, Any]]) -> None:
    values = [value for step in seen[0]["steps"] for value in step.values()]
    assert np.isfinite(values).all()
