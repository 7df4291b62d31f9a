"""Steps on one rank: parity with the reference loop, microbatches, and updates that must not happen."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from learner.beside.beside import build_beside
from learner.losses import LossInputs, LossOutput
from learner.objective import Objective
from learner.policy.model import Policy
from learner.step import accumulate_gradients, apply_update
from tests.learner.recorded import batch_of, random_step, rows_of, train_on
from tests.learner.reference import train
from tests.learner.tiny_models import built, logprobs, make_config, row_of, save_model

STEPS = [random_step(step) for step in range(1, 6)]
CONDITIONED = {"adam_epsilon": 1e-6}
"""AdamW's first update is lr·g/(|g| + ε): with ε = 1e-8 it blows rounding of a gradient near zero up to the size of the
learning rate. A larger ε bounds that, and so lets the comparison be tight for every single element."""


def largest_difference(policy: Policy, expected: dict[str, torch.Tensor]) -> float:
    found = dict(policy.named_full_tensors("float32"))
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in expected)


def five_steps(mesh: DeviceMesh, config: Config, num_microbatches: int) -> Policy:
    policy, optimizer = built(config, mesh)
    beside = build_beside(config, policy)
    for step, trajectories in enumerate(STEPS, start=1):
        parts = config.learner.minibatches
        batch = batch_of(trajectories, step, num_microbatches=num_microbatches, minibatches=parts)
        _, reason = train_on(batch, policy, optimizer, config, beside)
        assert not reason
    return policy


SCHEDULE = {"schedule": "cosine", "weight_decay": 10.0, "max_grad_norm": 0.05}


@pytest.mark.parametrize(
    ("family", "learner", "algorithm"),
    [
        ("qwen3", {}, {"loss": "ppo_clip"}),
        ("qwen3", {}, {"proximal": "log_linear", "correction": "token_tis", "advantage": "dr_grpo"}),
        ("qwen3", {}, {"loss": "policy_gradient", "i_know_this_is_biased": True, "drop_zero_advantage": False}),
        ("llama", SCHEDULE, {"loss": "ppo_clip"}),
        ("qwen3", {}, {"kl": "k3", "kl_coef": 0.3}),
        ("qwen3", {"minibatches": 3, "epochs": 2}, {"aggregation": "token"}),
        ("qwen3", {"minibatches": 2, "epochs": 2}, {"proximal": "current", "correction": "token_tis"}),
        ("qwen3", {"minibatches": 2}, {"proximal": "log_linear", "correction": "token_tis"}),
    ],
)
def test_five_steps_agree_with_the_reference(
    tmp_path: Path, mesh: DeviceMesh, family: str, learner: dict[str, Any], algorithm: dict[str, Any]
) -> None:
    folder = save_model(tmp_path, family, tied=family == "qwen3")
    sections = {"rollout": {"temperature": 0.9}, "learner": CONDITIONED | learner, "algorithm": algorithm}
    config = make_config(folder, **sections)
    policy = five_steps(mesh, config, 2)
    assert largest_difference(policy, train(folder, STEPS, config)) <= 1e-6
    assert largest_difference(policy, load_file(folder / "model.safetensors")) > 1e-3


def test_the_number_of_microbatches_does_not_matter(qwen3: Path, mesh: DeviceMesh) -> None:
    config = make_config(qwen3, learner=CONDITIONED)
    outcomes = []
    for num_microbatches in (1, 3, 20):  # of 20, some hold no trajectory at all
        policy, optimizer = built(config, mesh)
        batch = batch_of(STEPS[0], 1, num_microbatches=num_microbatches)
        sums, _ = train_on(batch, policy, optimizer, config)
        outcomes.append((sums, dict(policy.named_full_tensors("float32"))))
    (first, weights), *others = outcomes
    for sums, other in others:
        assert sums.metrics() == pytest.approx(first.metrics(), rel=1e-5, abs=1e-7)
        assert sums.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
        assert max(float((other[n] - weights[n]).abs().max()) for n in weights) < 1e-6


def test_metrics_are_means_over_the_tokens_in_the_loss(qwen3: Path, mesh: DeviceMesh) -> None:
    config = make_config(qwen3)
    policy, optimizer = built(config, mesh)
    fresh_group = [t for t in STEPS[3] if t.group == 2]  # some of its tokens were too old, and are not in the loss
    ages = [[3 if kept else 0 for kept in t.loss_mask] for t in fresh_group]
    drawn = [t for t in STEPS[3] if t.group != 2]
    drawn += [dataclasses.replace(t, versions=versions) for t, versions in zip(fresh_group, ages, strict=True)]
    rows = [t for t in drawn if t.group != 0]
    current, behaviour, fresh_answer = [], [], []
    for t in rows:
        is_fresh = all(version == 3 for version in t.versions)
        (values,) = logprobs(policy, [t.prompt_ids + t.response_ids])
        for i in range(len(t.response_ids)):
            if t.loss_mask[i]:
                current.append(values[len(t.prompt_ids) + i - 1].item())
                behaviour.append(t.logprobs[i])
                fresh_answer.append(is_fresh)
    sums, _ = train_on(batch_of(drawn, 4, num_microbatches=2), policy, optimizer, config)
    metrics = sums.metrics()
    new, old = torch.tensor(current), torch.tensor(behaviour)
    weight, fresh = (new - old).exp(), torch.tensor(fresh_answer)
    assert metrics["training/loss_tokens"] == len(current)
    expected = {
        "actor/ppo_kl": (old - new).mean(),
        "actor/ratio_mean": weight.mean(),
        "training/ess": weight.sum() ** 2 / (len(weight) * weight.square().sum()),
        "training/rollout_logprobs_diff_mean": (new - old).abs().mean(),
        "training/rollout_logprobs_diff_max": (new - old).abs().max(),
        "training/rollout_logprobs_diff_lag0_mean": (new - old).abs()[fresh].mean(),
        "training/rollout_probs_diff_mean": (new.exp() - old.exp()).abs().mean(),
        "training/rollout_probs_diff_max": (new.exp() - old.exp()).abs().max(),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4), name
    assert 0 < metrics["actor/pg_clipfrac"] < 1
    assert 0 < metrics["actor/entropy"] < math.log(64)


def test_a_batch_without_advantage_is_a_skip_that_says_so(qwen3: Path, mesh: DeviceMesh) -> None:
    config = make_config(qwen3)
    policy, optimizer = built(config, mesh)
    before = policy.parameter_digest()
    equal = [dataclasses.replace(t, reward=1.0) for t in STEPS[0]]
    sums, reason = train_on(batch_of(equal, 1), policy, optimizer, config)
    assert (reason, sums.metrics()) == ("no_tokens", {"training/loss_tokens": 0.0})
    assert policy.parameter_digest() == before and optimizer.num_steps == 0


def infinite_slope(inputs: LossInputs) -> LossOutput:
    """A loss of value 0 whose gradient is infinite."""
    return LossOutput(loss=(inputs.logprobs - inputs.logprobs.detach()).sqrt())


def test_a_loss_or_gradient_that_is_not_finite_is_never_applied(qwen3: Path, mesh: DeviceMesh) -> None:
    config = make_config(qwen3)
    policy, optimizer = built(config, mesh)
    before = policy.parameter_digest()

    norm = {shard.name: shard.local for shard in policy.shards()}["model.norm.weight"]
    old = norm[3].item()
    norm[3] = float("nan")
    _, reason = train_on(batch_of(STEPS[0], 1), policy, optimizer, config)
    norm[3] = old
    assert reason == "nonfinite_loss"

    rows, tokens = rows_of(batch_of(STEPS[0], 1), config)
    objective = Objective(config.algorithm)
    objective.loss = infinite_slope
    sums = accumulate_gradients(policy, rows, objective, temperature=1.0, global_tokens=tokens)
    assert sums.loss == 0
    assert apply_update(policy, optimizer, sums, max_grad_norm=1.0, lr=1.0) == "nonfinite_gradient"

    assert policy.parameter_digest() == before and optimizer.num_steps == 0
    assert all(p.grad is None for _, p in policy.named_parameters())
    _, reason = train_on(batch_of(STEPS[0], 1), policy, optimizer, config)
    assert not reason and policy.parameter_digest() != before


def test_a_wrong_token_count_is_an_error(qwen3: Path, mesh: DeviceMesh) -> None:
    config = make_config(qwen3)
    policy, _ = built(config, mesh)
    objective = Objective(config.algorithm)
    with pytest.raises(ValueError, match="3 tokens are in the loss over all ranks, the batch says 4"):
        accumulate_gradients(policy, [row_of([[0, 0, 0, 0]])], objective, temperature=1.0, global_tokens=4)


def test_bfloat16_compute_keeps_float32_masters(qwen3: Path, mesh: DeviceMesh) -> None:
    config = make_config(qwen3, learner={"compute_dtype": "bfloat16"})
    policy, optimizer = built(config, mesh)
    seen: list[torch.dtype] = []
    policy.model.transformer.model.norm.register_forward_hook(lambda *_: seen.append(_[2].dtype))
    _, reason = train_on(batch_of(STEPS[0], 1, num_microbatches=2), policy, optimizer, config)
    expected = train(qwen3, STEPS[:1], config)
    assert not reason and set(seen) == {torch.bfloat16}
    assert {p.dtype for _, p in policy.named_parameters()} == {torch.float32}
    assert 0 < largest_difference(policy, expected) < 5 * config.learner.lr
