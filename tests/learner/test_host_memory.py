"""What lies in host memory: the same steps, and a smaller budget of the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from examples.random_qwen3 import SHAPES
from learner import optimizer as optimizer_module
from learner.checkpoints.parts import HostMemory, Tensors
from learner.optimizer import MOMENTS
from learner.policy import pinned
from learner.policy.memory import GIB, Setup, choose
from learner.policy.model import Policy
from slipstream.families.sizes import Sizes
from tests.learner.recorded import batch_of, random_step, train_on
from tests.learner.tiny_models import built, make_config

STEPS = [random_step(step) for step in range(1, 4)]


def configured(folder: Path, **learner: Any) -> Config:
    return make_config(folder, learner={"adam_epsilon": 1e-6, **learner})


def trained(config: Config, mesh: DeviceMesh) -> tuple[Policy, Any]:
    policy, optimizer = built(config, mesh)
    for step, trajectories in enumerate(STEPS, start=1):
        _, reason = train_on(batch_of(trajectories, step, num_microbatches=2), policy, optimizer, config)
        assert not reason
    return policy, optimizer


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
        setup = Setup(sizes=Sizes.of(SHAPES["8B"]), learner=learner, num_ranks=8)
        found[key] = choose(setup.with_tokens(16_384), 200 * GIB).items
    moments = found[""]["AdamW state"]
    assert sum(found[""].values()) - sum(found["offload_optimizer"].values()) == moments, "activations go first"
    assert found[""]["activations"] - found["offload_activations"]["activations"] == 34 * 4096 * 2 * 16_384


def test_copies_of_a_checkpoint_take_what_they_hold_and_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the power of two above each tensor, which torch's allocator of pinned memory would take."""
    monkeypatch.setattr(pinned, "BLOCK_BYTES", 1 << 20)
    shapes = [(1000, 64), (0, 64), *[(300, 64), (100, 64), (64,), (1,)] * 20]
    held = {str(i): torch.full(shape, float(i)) for i, shape in enumerate(shapes)}
    memory, part = HostMemory(), Tensors(held, {kind: held for kind in MOMENTS}, 3)
    first = memory.copy(part)
    for source in held.values():
        source.add_(1000)
    again = memory.copy(part)
    copies = [copy for copied in (again.weights, *again.moments.values()) for copy in copied.values()]
    assert list(again.moments) == list(MOMENTS) and again.num_steps == 3
    for copied in (again.weights, *again.moments.values()):
        assert copied.keys() == held.keys() and all(torch.equal(copied[name], held[name]) for name in held)
    assert all(torch.equal(copy, again.weights[name]) for name, copy in first.weights.items()), "in the same memory"
    blocks = {copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in copies}
    needed = sum(copy.nbytes for copy in copies)
    assert all(size.bit_count() == 1 for size in blocks.values()) and needed <= sum(blocks.values()) <= 1.1 * needed
    assert all(copy.data_ptr() % 64 == 0 for copy in copies)
