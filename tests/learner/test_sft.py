"""Objectives that learn from answers in the data: the loss, its gradient, and which guards speak."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from configs import Config, ConfigError
from learner.advantages import build_advantage
from learner.guards import Guards
from learner.rows import check
from learner.step import StepSums, accumulate_gradients
from learner.trainer import Trainer, nothing_expected, objective_of, prepare
from replay.messages import Batch
from tests.learner.recorded import batch_of, random_step
from tests.learner.tiny_models import built, make_config

SFT: dict[str, Any] = {"learner": {"objective": "sft"}, "rollout": {"temperature": 0.5, "groups_per_step": 16}}


def demonstrations(step: int, *, num_microbatches: int = 1) -> Batch:
    """Rows of data, of which each is a group of one answer, as replay has them in a batch."""
    rows = random_step(step, num_groups=16, group_size=1)
    batch = batch_of(rows, step, num_microbatches=num_microbatches)
    nothing = np.zeros_like(batch.logprobs)
    versions = np.full_like(batch.versions, step - 1)
    return dataclasses.replace(batch, logprobs=nothing, versions=versions, all_rewards=0 * batch.all_rewards)


def expected_loss(model: torch.nn.Module, batch: Batch, aggregation: str) -> torch.Tensor:
    """Of transformers' own forward, one answer after the other."""
    tokens = np.split(batch.token_ids, np.cumsum(batch.prompt_lengths + batch.lengths)[:-1])
    masks = np.split(batch.loss_mask, np.cumsum(batch.lengths)[:-1])
    each = []
    for ids, prompt, mask in zip(tokens, batch.prompt_lengths, masks, strict=True):
        whole = torch.from_numpy(ids.astype(np.int64))
        logits = model(input_ids=whole[None]).logits[0, prompt - 1 : -1]
        each.append(cross_entropy(logits, whole[prompt:], reduction="none")[torch.from_numpy(mask) != 0])
    return torch.cat(each).mean() if aggregation == "token" else torch.stack([one.mean() for one in each]).mean()


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_sft_is_cross_entropy_at_temperature_1_however_it_is_divided(qwen3, mesh, aggregation):
    found = []
    for num_microbatches in (1, 3):
        config = make_config(qwen3, **SFT, algorithm={"aggregation": aggregation})
        policy, optimizer = built(config, mesh)
        trainer = Trainer(config, policy, optimizer, guards=Guards(config))
        batch = demonstrations(1, num_microbatches=num_microbatches)
        before = {name: value.clone() for name, value in policy.named_full_tensors("float32")}
        update = trainer.train_step(batch)
        values = update.values
        assert update.applied and values["training/loss_tokens"] == batch.total_loss_tokens
        assert not [name for name in values if name.startswith(("critic/", "rollout")) or "kl" in name]
        found.append((values["sft/loss"], values["actor/grad_norm"]))
        assert any(not torch.equal(before[name], value) for name, value in policy.named_full_tensors("float32"))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(qwen3).double()
    loss = expected_loss(model, batch, aggregation)
    assert found[0][0] == pytest.approx(loss.item(), rel=1e-5)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.cat([one.flatten() for one in gradients]).norm()
    assert found[0][1] == pytest.approx(norm.item(), rel=1e-4)


def gradient_of(config: Config, mesh: DeviceMesh, batch: Batch) -> tuple[torch.Tensor, StepSums]:
    """Of one policy in one batch, and what was measured."""
    policy, _ = built(config, mesh)
    work = prepare(
        batch, nothing_expected if config.learner.facts.from_data else build_advantage(config.algorithm), config
    )
    tokens = {"temperature": 1.0, "global_tokens": work.global_tokens}
    sums = accumulate_gradients(policy, work.rows, objective_of(config), **tokens)
    return torch.cat([one.flatten() for one in policy.local_gradients()]), sums


def test_a_term_beside_rewards_adds_its_gradient_and_leaves_their_measurements(qwen3, mesh):
    sampled, taught = random_step(1), random_step(1, num_groups=16, group_size=1, seed=1)
    nothing = [dataclasses.replace(t, logprobs=[0.0] * len(t.versions), versions=[0] * len(t.versions)) for t in taught]
    both = batch_of([*sampled, *(dataclasses.replace(t, group=t.group + 4, reward=0.0) for t in nothing)], 1)
    behind = (both.trajectory >= len(sampled)).astype(np.int32)
    both = dataclasses.replace(both, microbatch=behind, num_microbatches=2, minibatches=[], taught=[16, 1])
    check(both, async_lag=2, vocab_size=64)
    rl = make_config(qwen3, limits={"flat_reward_steps": 1})
    mixed = make_config(qwen3, learner={"sft": {"data": "rows.jsonl", "coef": 0.5}}, limits={"flat_reward_steps": 1})
    whole, sums = gradient_of(mixed, mesh, both)
    of_rewards, sums_of_rewards = gradient_of(rl, mesh, batch_of(sampled, 1))
    of_rows, sums_of_rows = gradient_of(make_config(qwen3, **SFT), mesh, batch_of(nothing, 1))
    assert (whole - (of_rewards + 0.5 * of_rows)).abs().max() < 1e-6 < of_rows.abs().max()
    measured, wanted = sums.metrics(), sums_of_rewards.metrics()
    assert measured.pop("sft/loss") == pytest.approx(sums_of_rows.metrics()["sft/loss"], rel=1e-6)
    assert measured == pytest.approx(wanted, rel=1e-5)
    said = [Guards(mixed).memory.signals(sums, both)]
    said.append(Guards(rl).memory.signals(sums_of_rewards, batch_of(sampled, 1)))
    found, expected = ({name: value for name, value in one.items() if value is not None} for one in said)
    assert found == pytest.approx(expected, rel=1e-5) and "flat_reward_steps" in found


def test_guards_of_sampled_answers_are_silent_and_the_others_speak(qwen3):
    config = make_config(
        qwen3,
        **SFT,
        limits={"flat_reward_steps": 2, "nonfinite_steps": 1, "ess": "skip below 0.9", "zero_gradient_steps": 2},
    )
    guards = Guards(config)
    good = {"loss": 2.0, "squared_gradient": 1.0, "entropy": 30.0, "tokens": 9.0}
    for step in range(1, 30):
        assert not guards.judge(StepSums(good, 9), demonstrations(step)).alarms
    still = [guards.judge(StepSums(good | {"squared_gradient": 0.0}, 9), demonstrations(step)) for step in (30, 31)]
    assert [alarm.guard for alarm in still[-1].alarms] == ["zero_gradient_steps"]
    broken = guards.judge(StepSums(good | {"loss": float("nan")}, 9), demonstrations(32))
    assert "nonfinite_steps" in [alarm.guard for alarm in broken.alarms]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"algorithm": {"kl": "k3"}}, "algorithm.kl"),
        ({"algorithm": {"dynamic_sampling": "flat"}}, "algorithm.dynamic_sampling"),
        ({"learner": {"objective": "sft", "target_kl": 0.1, "epochs": 2}}, "learner.target_kl"),
        ({"learner": {"objective": "stf"}}, "did you mean 'sft'"),
        ({"learner": {"objective": {"rl": {"clip": 1}}}}, "section algorithm"),
        ({"learner": {"objective": "sft", "sft": {"data": "x"}}}, "learner.sft.data: 'x' with learner.objective: sft"),
        ({"learner": {"sft": {"data": "x"}}}, "learner.sft.data: 'x' with rollout.temperature: 0.5"),
    ],
)
def test_what_is_about_sampled_answers_is_refused_by_name(qwen3, sections, said):
    with pytest.raises(ConfigError, match=said):
        make_config(qwen3, **SFT | sections)
