"""Trajectories in one row without padding: the same logits, gradients and updates as with padding."""

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recorded import batch_of, random_step
from tiny_models import SIZES, built, logits, make_config, save_model
from transformers import Qwen3Config

from configs import Config
from learner import attention
from learner.losses import build_loss
from learner.model import Policy, build_policy
from learner.packing import pack
from learner.step import StepSums, accumulate_gradients

CPU = torch.device("cpu")
STEPS = [random_step(step) for step in range(1, 6)]


def configured(folder: Path, mode: str, **learner: Any) -> Config:
    conditioned = {"adam_epsilon": 1e-6, "attention": mode}
    return make_config(folder, replay={"async_lag": 2}, learner=conditioned | learner)


def accumulated(policy: Policy, config: Config, num_microbatches: int) -> tuple[StepSums, dict[str, torch.Tensor]]:
    """Measurements of one batch, and the gradients that it left."""
    batch = batch_of(STEPS[0], 1, num_microbatches=num_microbatches)
    advantages = np.linspace(-1, 1, len(STEPS[0]), dtype=np.float32)
    packed = pack(batch, advantages, advantages != 0, unpadded=policy.unpadded)
    sums = accumulate_gradients(policy, packed, build_loss(config.algorithm), temperature=0.9)
    names = [shard.name for shard in policy.shards()]
    return sums, {n: g.clone() for n, g in zip(names, policy.local_gradients(), strict=True)}


def row_of(lengths: list[int]) -> tuple[torch.Tensor, dict[str, Any]]:
    """(token ids [1, total], arguments of the forward) of trajectories of these lengths."""
    ids = torch.randint(1, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return ids, {"position_ids": positions, **attention.arguments(starts, max(lengths))}


@pytest.mark.parametrize(
    ("family", "tied", "num_microbatches"),
    [("qwen3", True, 1), ("qwen2", False, 3), ("llama", False, 20)],  # of 20, some hold no trajectory at all
)
def test_gradients_and_measurements_equal_those_with_padding(tmp_path, mesh, family, tied, num_microbatches):
    save_model(tmp_path, family, tied=tied)
    outcomes = []
    for mode in ("sdpa", "varlen"):
        config = configured(tmp_path, mode)
        outcomes.append(accumulated(built(config, mesh)[0], config, num_microbatches))
    (expected, gradients), (found, others) = outcomes
    assert found.metrics() == pytest.approx(expected.metrics(), rel=1e-5, abs=1e-6)
    assert gradients.keys() == others.keys()
    for name in gradients:
        torch.testing.assert_close(others[name], gradients[name], rtol=1e-4, atol=1e-6)


def test_microbatches_of_the_other_layout_are_refused(qwen3, mesh):
    policy = build_policy(configured(qwen3, "sdpa"), mesh, CPU)
    packed = pack(batch_of(STEPS[0], 1), np.ones(16, np.float32), np.ones(16, np.bool_), unpadded=True)
    with pytest.raises(ValueError, match="must be packed with unpadded=False"):
        policy.token_logprobs(packed.microbatches[0], 1.0)


# ---- what is chosen -------------------------------------------------------------------------------------


def test_a_cpu_pads_unless_told_otherwise(qwen3, caplog):
    model = Qwen3Config(**SIZES)
    modes = {mode: attention.choose(configured(qwen3, mode).learner, model, CPU) for mode in ("auto", "sdpa")}
    assert modes == {"auto": attention.PADDED, "sdpa": attention.PADDED} and not caplog.messages
    assert attention.choose(configured(qwen3, "varlen").learner, model, CPU) == attention.LOOP
    assert "the kernel needs CUDA, the learner runs on cpu" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "reason"),
    [
        ("bfloat16", 128, (9, 0), ""),
        ("float32", 128, (9, 0), "it is 'float32'"),
        ("bfloat16", 20, (9, 0), "the model has 20"),
        ("bfloat16", 320, (9, 0), "the model has 320"),
        ("bfloat16", 128, (7, 5), "compute capability 8.0"),
    ],
)
def test_what_the_kernel_takes(monkeypatch, dtype, head_dim, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    found = attention.reason_against_varlen(torch.device("cuda", 0), dtype, head_dim)
    assert reason in found if reason else not found


# ---- torch's kernel, stood in for by signatures it had ----------------------------------------------------


def kernel(expected: dict[str, Any]) -> Callable[..., Any]:
    """A kernel that takes these keywords and no other: [total, heads, D], causal within each trajectory."""

    def attend(q: Any, k: Any, v: Any, starts: Any, starts_k: Any, longest: int, longest_k: int, **given: Any) -> Any:
        grouped = given.get("enable_gqa", False)
        assert given == expected and longest == longest_k == 13
        assert starts.dtype == torch.int32 and {t.dim() for t in (q, k, v)} == {3}
        assert grouped or q.shape[1] == k.shape[1], "key heads must be repeated"
        out = torch.empty_like(q)
        for begin, end in itertools.pairwise(starts.tolist()):
            part = [t[begin:end].transpose(0, 1)[None] for t in (q, k, v)]
            attended = torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=grouped)
            out[begin:end] = attended[0].transpose(0, 1)
        return out

    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in expected]
    attend.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return attend


@pytest.mark.parametrize(
    "keywords", [{"is_causal": True}, {"window_size": (-1, 0)}, {"window_size": (-1, 0), "enable_gqa": True}]
)
def test_every_signature_of_the_kernel_is_called_right(qwen3, mesh, monkeypatch, keywords):
    ids, arguments = row_of([5, 1, 13, 8])
    expected = logits(build_policy(configured(qwen3, "varlen"), mesh, CPU), ids, **arguments)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel(keywords))
    monkeypatch.setattr(attention, "reason_against_varlen", lambda *_: "")
    attention._kernel.cache_clear()
    try:
        policy = build_policy(configured(qwen3, "auto"), mesh, CPU)
        assert policy.model.config._attn_implementation == attention.VARLEN and policy.unpadded
        found = logits(policy, ids, **arguments)
    finally:
        attention._kernel.cache_clear()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# ---- recomputation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sdpa", "varlen"])
def test_recomputing_changes_the_number_of_forwards_and_nothing_else(qwen3, mesh, mode):
    outcomes = []
    for recompute in (False, True):
        config = configured(qwen3, mode, recompute=recompute)
        policy, _ = built(config, mesh)
        calls: list[int] = []
        policy.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        sums, gradients = accumulated(policy, config, 3)
        outcomes.append((sums, gradients, len(calls), policy.layout("float32")))
    (plain, gradients, calls, layout), (again, others, more, same) = outcomes
    assert (calls, more) == (3, 6) and layout == same
    assert plain == again and all(torch.equal(gradients[name], others[name]) for name in gradients)
