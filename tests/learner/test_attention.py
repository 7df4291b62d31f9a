"""Trajectories in one row: the logprobs of a transformers model, and the same from every kernel and recomputation."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import Gemma2Config, Qwen3Config

from configs import Config
from configs.learner import LearnerSettings
from learner.objective import Objective
from learner.policy import attention
from learner.policy.model import Policy
from learner.policy.pretrained import PolicyError
from learner.step import StepSums, accumulate_gradients
from tests.learner.recorded import batch_of, random_step, rows_of
from tests.learner.tiny_models import SIZES, built, logprobs, make_config, row_of

CPU = torch.device("cpu")
SEQUENCES = [
    torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (5, 2, 13, 8)
]


def configured(folder: Path, mode: str = "auto", **learner: Any) -> Config:
    conditioned = {"adam_epsilon": 1e-6, "attention": mode, "share_prefixes": False}
    return make_config(folder, learner=conditioned | learner)


def accumulated(policy: Policy, config: Config) -> tuple[StepSums, dict[str, torch.Tensor]]:
    """Measurements of one batch, and the gradients that it left."""
    rows, tokens = rows_of(batch_of(random_step(1), 1, num_microbatches=3), config)
    sums = accumulate_gradients(policy, rows, Objective(config.algorithm), temperature=0.9, global_tokens=tokens)
    names = [shard.name for shard in policy.shards()]
    return sums, {n: g.clone() for n, g in zip(names, policy.local_gradients(), strict=True)}


# ---- what is chosen -------------------------------------------------------------------------------------


def test_a_cpu_pads_unless_told_otherwise(qwen3: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Qwen3Config(**SIZES)
    modes = {mode: attention.choose(configured(qwen3, mode).learner, model, CPU) for mode in ("auto", "sdpa")}
    assert modes == {"auto": attention.PADDED, "sdpa": attention.PADDED} and not caplog.messages
    assert attention.choose(configured(qwen3, "varlen").learner, model, CPU) == attention.PADDED
    assert "the kernel needs CUDA, the learner runs on cpu" in caplog.text
    caplog.clear()
    of_float32 = configured(qwen3, compute_dtype="float32").learner
    assert attention.choose(of_float32, model, torch.device("cuda")) == attention.PADDED
    assert "learner.attention: each trajectory is padded to the longest of its row" in caplog.text, "of auto on a GPU"


def test_scores_that_are_capped_take_padding(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "reason_against_varlen", lambda *_: "")
    monkeypatch.setattr(attention, "make_varlen", lambda: None)
    learner = configured(qwen3).learner
    found = [attention.choose(learner, Gemma2Config(**SIZES, attn_logit_softcapping=cap), CPU) for cap in (None, 50.0)]
    assert found == [attention.VARLEN, attention.PADDED]


@pytest.mark.parametrize(
    ("lengths", "kind", "is_cuda", "warns"),
    [
        ([2] * 9 + [60], attention.PADDED, True, True),
        ([2] * 9 + [60], attention.PADDED, False, False),
        ([2] * 9 + [60], attention.VARLEN, True, False),
        ([20, 60], attention.PADDED, True, False),
    ],
)
def test_a_row_that_pads_to_more_than_its_budget_is_named_once(
    lengths: list[int],
    kind: str,
    is_cuda: bool,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(attention, "WARNED_ROWS", set())
    row = row_of([[5] * length for length in lengths])
    ids: Any = SimpleNamespace(shape=row.input_ids.shape, is_cuda=is_cuda)
    for _ in range(2):
        attention.warn_of_padding(replace(row, input_ids=ids), kind)
    expected = "attention pads a row of 78 tokens to 600 places, and the memory budget counts 4 a token"
    assert [line.partition(";")[0] for line in caplog.messages] == [expected] * warns


def test_every_row_is_looked_at_for_its_padding(qwen3: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(attention, "warn_of_padding", lambda _, kind: asked.append(kind))
    logprobs(built(configured(qwen3), mesh)[0], SEQUENCES)
    assert asked == [attention.PADDED]


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
def test_what_the_kernel_takes(
    monkeypatch: pytest.MonkeyPatch, dtype: str, head_dim: int, capability: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    learner = LearnerSettings.model_validate({"compute_dtype": dtype})
    found = attention.reason_against_varlen(torch.device("cuda", 0), learner, head_dim)
    assert reason in found if reason else not found


# ---- what a family asks for ------------------------------------------------------------------------------


def test_arguments_of_attention_that_are_not_computed_are_errors() -> None:
    attention.check_understood({"dropout": 0.0, "s_aux": None, "position_ids": torch.zeros(1)})
    for name, value in (("indexer", 50.0), ("s_aux", torch.zeros(1)), ("dropout", 0.1), ("layer_head_mask", 0)):
        with pytest.raises(PolicyError, match=name):
            attention.check_understood({name: value})


# ---- recomputation --------------------------------------------------------------------------------------


def test_recomputing_changes_the_number_of_forwards_and_nothing_else(qwen3: Path, mesh: DeviceMesh) -> None:
    outcomes = []
    for recompute in ("none", "full", "selective"):
        config = configured(qwen3, recompute=recompute)
        policy, _ = built(config, mesh)
        calls: list[int] = []
        layer = policy.model.transformer.model.layers[1]
        mlp = next(module for name, module in layer.named_modules() if name.endswith("mlp"))
        mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        sums, gradients = accumulated(policy, config)
        outcomes.append((sums, gradients, len(calls), policy.layout.names))
    (plain, gradients, calls, layout), *others = outcomes
    assert calls == 3
    for again, found, more, same in others:
        assert more == 6 and layout == same
        assert plain == again and all(torch.equal(gradients[name], found[name]) for name in gradients)


@pytest.mark.slow  # the compiler takes a minute on a CPU
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_layers_have_the_same_gradients(qwen3: Path, mesh: DeviceMesh, recompute: str) -> None:
    outcomes = []
    for compiled in (False, True):
        config = configured(qwen3, recompute=recompute, compile=compiled)
        outcomes.append(accumulated(built(config, mesh)[0], config)[1])
    expected, found = outcomes
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) < 1e-6
