"""Prompts that answers share: the same logprobs, gradients and weights as when each answer has its own."""

import dataclasses
import inspect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from transformers import Qwen3Config

from configs import Config, ConfigError
from learner.objective import Objective
from learner.policy import attention
from learner.policy.model import Policy, build_policy
from learner.rows import Row, lay_out
from learner.step import accumulate_gradients
from tests.learner.recorded import batch_of, random_step, rows_of
from tests.learner.reference import Recorded
from tests.learner.tiny_models import SIZES, make_config, save_model

CPU = torch.device("cpu")
STEPS = [random_step(step) for step in range(1, 6)]
VOCABULARY = 64


def configured(folder: Path, share: Any, **learner: Any) -> Config:
    return make_config(folder, learner={"adam_epsilon": 1e-6, "share_prefixes": share} | learner)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory, mesh: DeviceMesh) -> Policy:
    """Of two layers, with several heads to a key."""
    folder = save_model(tmp_path_factory.mktemp("small"), hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    return build_policy(configured(folder, True), mesh, CPU)


def trajectory(prompt: Sequence[int], mask: Sequence[int], group: int, seed: int) -> Recorded:
    """Of a random answer with this loss mask."""
    random, length = np.random.default_rng(seed), len(mask)
    return Recorded(
        prompt_ids=list(prompt),
        response_ids=random.integers(0, VOCABULARY, length).tolist(),
        loss_mask=list(mask),
        logprobs=random.normal(-4, 0.4, length).tolist(),
        versions=[0] * length,
        reward=float(random.integers(0, 2)),
        group=group,
    )


def rows(trajectories: Sequence[Recorded], share: Any, num_microbatches: int = 1) -> list[Row]:
    """Of a batch in which every trajectory has an advantage of its own."""
    batch = batch_of(trajectories, 1, num_microbatches=num_microbatches)
    advantages = np.linspace(-1, 1, len(trajectories)).astype(np.float32)
    return lay_out(batch, advantages, np.full(len(trajectories), 0.5, np.float32), share)


def computed(policy: Policy, laid: Sequence[Row]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logprobs and entropies of all rows, and the gradient of a mean over both that weighs each token differently."""
    policy.clear_gradients()
    found, tokens = [], sum(len(row.kept) for row in laid)
    for number, row in enumerate(laid, start=1):
        policy.prepare_row(last=number == len(laid))
        logprobs, entropy = policy.forward(row, 0.9)
        upstream = torch.linspace(-1, 1, len(logprobs) + 1)[1:] / tokens
        ((logprobs + 0.1 * entropy) * upstream).sum().backward()
        found.append(torch.stack([logprobs, entropy]).detach())
    return torch.cat(found, dim=1), [gradient.clone() for gradient in policy.local_gradients()]


# ---- where tokens lie -----------------------------------------------------------------------------------


def test_where_it_does_not_pay_a_row_is_as_it_was() -> None:
    long = [trajectory(range(64), [1] * 8, 0, seed) for seed in range(2)]
    short = [dataclasses.replace(t, prompt_ids=t.prompt_ids[1:]) for t in long]
    assert [rows(long, "auto")[0].saved, rows(short, "auto")[0].saved, rows(short, True)[0].saved] == [64, 0, 63]
    (one,), (other,) = rows(short, "auto"), rows(short, False)
    assert one.prefixes is None and one.input_ids.tolist() == other.input_ids.tolist()


# ---- the same numbers -----------------------------------------------------------------------------------

MASK = st.lists(st.integers(0, 1), min_size=1, max_size=9)
GROUP = st.tuples(st.integers(1, 12), st.lists(MASK, min_size=1, max_size=4))


@settings(max_examples=25)
@given(st.lists(GROUP, min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 100))
def test_logprobs_and_gradients_are_those_of_prompts_that_are_not_shared(
    policy: Policy, groups: list[tuple[int, list[list[int]]]], num_microbatches: int, seed: int
) -> None:
    """Prompts from one token on, answers without a token in the loss, groups cut by microbatches or of one answer."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, VOCABULARY, length).tolist() for length, _ in groups]
    all_masks = [(number, mask) for number, (_, masks) in enumerate(groups) for mask in masks]
    dealt = random.permutation(len(all_masks)).tolist()  # members of a group need not be neighbours
    given = [trajectory(prompts[all_masks[i][0]], all_masks[i][1], all_masks[i][0], i) for i in dealt]
    apart, shared = (rows(given, share, num_microbatches) for share in (False, True))
    if not sum(len(row.kept) for row in apart):
        return
    (expected, gradients), (found, others) = computed(policy, apart), computed(policy, shared)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-3
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-6)
    tokens = [sum(row.input_ids.numel() + row.saved for row in laid) for laid in (apart, shared)]
    assert tokens[0] == tokens[1]


@pytest.mark.slow  # the compiler takes a minute on a CPU
def test_compiled_layers_share_prompts_and_compile_once(qwen3: Path, mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    outcomes, graphs = [], []
    for compiled in (False, True):
        config = configured(qwen3, True, compile=compiled)
        trained, found = build_policy(config, mesh, CPU), []
        for step, trajectories in enumerate(STEPS[:4], start=1):
            laid, tokens = rows_of(batch_of(trajectories, step), config)
            assert laid[0].prefixes is not None
            objective = Objective(config.algorithm)
            accumulate_gradients(trained, laid, objective, temperature=1.0, global_tokens=tokens)
            found += [gradient.clone() for gradient in trained.local_gradients()]
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        outcomes.append(found)
    assert max(float((one - other).abs().max()) for one, other in zip(*outcomes, strict=True)) < 1e-6
    assert graphs[5:] == [graphs[4]] * 3, "a layer is compiled once for rows of any shape"
    assert not torch._dynamo.utils.counters["graph_break"]


# ---- torch's kernel, stood in for -----------------------------------------------------------------------


def kernel(
    q: Any,
    k: Any,
    v: Any,
    starts: Any,
    key_starts: Any,
    longest: int,
    longest_key: int,
    *,
    last: bool = True,
    **given: Any,
) -> Any:
    """[total, heads, D], causal within each segment; masks are aligned to the last query and key, or to the first."""
    window, right = given.get("window_size", (-1, 0))
    assert right == 0
    out = torch.empty_like(q)
    segments = zip(itertools.pairwise(starts.tolist()), itertools.pairwise(key_starts.tolist()), strict=True)
    for (begin, end), (key_begin, key_end) in segments:
        assert 0 < end - begin <= longest and end - begin <= key_end - key_begin <= longest_key
        part = [q[begin:end].transpose(0, 1)[None], *(t[key_begin:key_end].transpose(0, 1)[None] for t in (k, v))]
        earlier = (key_end - key_begin - (end - begin)) * last
        sees = torch.ones(end - begin, key_end - key_begin).tril(earlier).bool()
        if window >= 0:
            sees &= sees.new_ones(sees.shape).triu(earlier - window)
        attended = torch.nn.functional.scaled_dot_product_attention(
            *part, attn_mask=sees, enable_gqa=True, scale=given.get("scale")
        )
        out[begin:end] = attended[0].transpose(0, 1)
    assert (end, key_end) == (len(q), len(k))
    return out


def stand_in(patch: pytest.MonkeyPatch, keywords: list[str], *, last: bool = True) -> None:
    """Put `kernel` in the place of torch's, with a signature that this had."""

    def attend(*given: Any, **options: Any) -> Any:
        assert set(options) == set(keywords)
        return kernel(*given, last=last, **options)

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in keywords]
    attend.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    patch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    patch.setattr(attention, "reason_against_varlen", lambda *_: "")


@pytest.mark.parametrize("keywords", [["is_causal"], ["window_size"], ["window_size", "enable_gqa"]], ids=str)
def test_the_kernel_is_given_each_answer_with_its_prompt(
    qwen3: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, keywords: list[str]
) -> None:
    config = configured(qwen3, True)
    laid, _ = rows_of(batch_of(STEPS[0], 1), config)
    expected, gradients = computed(build_policy(config, mesh, CPU), laid)
    stand_in(monkeypatch, keywords)
    trained = build_policy(config, mesh, CPU)
    assert trained.model.transformer.config._attn_implementation == attention.VARLEN
    found, others = computed(trained, laid)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for gradient, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, gradient, rtol=0, atol=1e-6)


def test_a_kernel_that_aligns_its_mask_to_the_first_key_is_refused_before_the_first_step(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, ["window_size"], last=False)
    model = Qwen3Config(**SIZES)
    with pytest.raises(ConfigError, match=r"share_prefixes: 'auto' needs .* take learner\.share_prefixes=false"):
        attention.choose(configured(qwen3, "auto").learner, model, CPU)
    assert attention.choose(configured(qwen3, False).learner, model, CPU) == attention.VARLEN
