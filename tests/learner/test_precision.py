"""float16 with a scaled loss, and what lies in host memory: the same steps, skips that cure themselves, checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from learner import optimizer as optimizer_module
from learner.checkpoints.checkpointer import Checkpointer
from learner.guards import Guards
from learner.optimizer import FIRST_SCALE, GROW_AFTER, LossScale
from learner.policy.memory import GIB, Setup, Sizes, choose
from learner.policy.model import Policy
from learner.step import OVERFLOW
from learner.trainer import Trainer
from tests.learner.recorded import batch_of, random_step, train_on
from tests.learner.reference import train
from tests.learner.tiny_models import built, make_config, saved

STEPS = [random_step(step) for step in range(1, 4)]


def configured(folder: Path, **learner: Any) -> Config:
    return make_config(folder, replay={"async_lag": 2}, learner={"adam_epsilon": 1e-6, **learner})


def trained(config: Config, mesh: DeviceMesh) -> tuple[Policy, Any]:
    policy, optimizer = built(config, mesh)
    for step, trajectories in enumerate(STEPS, start=1):
        _, reason = train_on(batch_of(trajectories, step, num_microbatches=2), policy, optimizer, config)
        assert not reason
    return policy, optimizer


def test_the_scale_halves_at_an_overflow_and_doubles_after_good_steps() -> None:
    scale = LossScale(is_dynamic=True)
    assert [scale.shrink() for _ in range(17)] == [True] * 16 + [False] and scale.value == 1
    for _ in range(GROW_AFTER - 1):
        scale.grow()
    again = LossScale(is_dynamic=True)
    again.load(scale.state())
    again.grow()
    assert (scale.value, again.value) == (1, 2)
    fixed = LossScale(is_dynamic=False)
    fixed.load([8.0, 3])
    fixed.grow()
    assert (fixed.value, fixed.state(), fixed.shrink()) == (1, None, False)


def test_float16_trains_with_masters_in_float32_and_says_its_scale(qwen3: Path, mesh: DeviceMesh) -> None:
    config = configured(qwen3, compute_dtype="float16")
    policy, optimizer = built(config, mesh)
    assert optimizer.scale.value == FIRST_SCALE
    optimizer.scale.value = 2.0**10  # which no gradient of this model is too large for
    sums, reason = train_on(batch_of(STEPS[0], 1, num_microbatches=2), policy, optimizer, config)
    assert not reason and sums.metrics()["actor/loss_scale"] == 2.0**10
    plain = configured(qwen3)
    exact, _ = train_on(batch_of(STEPS[0], 1, num_microbatches=2), *built(plain, mesh), plain)
    assert sums.grad_norm == pytest.approx(exact.grad_norm, rel=0.02) and "actor/loss_scale" not in exact.metrics()
    found, expected = dict(policy.named_full_tensors("float32")), train(qwen3, STEPS[:1], config)
    assert 0 < max(float((found[name] - expected[name]).abs().max()) for name in expected) < 5 * config.learner.lr


def test_an_overflow_is_left_out_and_the_next_step_goes_on(tmp_path: Path, qwen3: Path, mesh: DeviceMesh) -> None:
    config = configured(qwen3, compute_dtype="float16")
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(tmp_path)})})
    policy, optimizer = built(config, mesh)
    optimizer.scale.value = 2.0**40
    before = policy.parameter_digest()
    _, reason = train_on(batch_of(STEPS[0], 1), policy, optimizer, config)
    assert (reason, optimizer.scale.value) == (OVERFLOW, 2.0**39)
    assert policy.parameter_digest() == before and optimizer.num_steps == 0
    folder = saved(Checkpointer(config, policy, optimizer), 1)
    again, resumed = built(config, mesh)
    Checkpointer(config, again, resumed).load(folder)
    assert resumed.scale.value == 2.0**39
    guards = Guards(config)
    trainer = Trainer(config, policy, optimizer, guards=guards)
    assert trainer.train_step(batch_of(STEPS[0], 1)).reason == OVERFLOW and not guards.broken, "it cures itself"
    policy.shards()[0].local[0] = float("nan")
    assert trainer.train_step(batch_of(STEPS[0], 1)).reason == "nonfinite_loss"
    assert list(guards.broken) == ["nonfinite_steps/0 above 0.5"]


def test_moments_in_host_memory_and_inputs_of_layers_change_no_bit(
    qwen3: Path, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = trained(configured(qwen3, recompute="full"), mesh)
    monkeypatch.setattr(optimizer_module, "OFFLOADED_BYTES", 20_000)  # several spans
    packed: list[torch.Size] = []
    original = torch.autograd.graph.save_on_cpu.__init__

    def counting(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        pack = self.pack_hook
        self.pack_hook = lambda tensor: (packed.append(tensor.shape), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph.save_on_cpu, "__init__", counting)
    offloaded, optimizer = trained(configured(qwen3, offload_optimizer=True, offload_activations=True), mesh)
    assert plain.parameter_digest() == offloaded.parameter_digest()
    assert len(optimizer._spans) > 3 and optimizer.num_steps == len(STEPS)
    assert packed.count(packed[0]) and {shape[-1] for shape in packed if len(shape) == 3} == {64}


def test_what_lies_in_host_memory_is_not_counted_on_the_device() -> None:
    found = {}
    for key in ("", "offload_optimizer", "offload_activations"):
        learner = configured(Path("unused"), recompute="full", **({key: True} if key else {})).learner
        sizes = {"hidden": 4096, "layers": 36, "intermediate": 12_288, "query": 4096, "key_value": 2048}
        setup = Setup(sizes=Sizes(**sizes, vocabulary=151_936, tied=False), learner=learner, num_ranks=8)
        found[key] = choose(setup.with_tokens(16_384), 200 * GIB).items
    assert found["offload_optimizer"]["AdamW state"] < 0.2 * found[""]["AdamW state"]
    assert found[""]["activations"] - found["offload_activations"]["activations"] == 34 * 4096 * 2 * 16_384
