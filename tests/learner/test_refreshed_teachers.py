"""Teachers that are refreshed from the policy: what reaches their processes, what a checkpoint keeps."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from configs.infrastructure import WeightBus
from configs.teachers import Teacher
from learner.beside.beside import build_beside
from learner.beside.refreshed import RefreshedTeachers
from learner.checkpoints.checkpointer import Checkpointer
from learner.optimizer import Optimizer
from learner.policy.memory import Setup
from learner.policy.model import Policy
from learner.ranks import Ranks
from slipstream.runtime.fingerprint import read_json
from tests.learner.recorded import batch_of, random_step, train_on
from tests.learner.tiny_models import CPU, built, make_config, saved
from tests.support import bus_receiver
from tests.support.bus_receiver import RUN, Rollout
from tests.support.waiting import until
from weight_bus.adapters import PREFIX
from weight_bus.digest import slice_digest

DECAY = 0.75
TEACHERS = {"old": Teacher(of="lagged", every=2), "mean": Teacher(of="average", every=1, decay=DECAY)}
Values = dict[str, torch.Tensor]


def configured(folder: Path, run: Path, **learner: Any) -> Config:
    plain = make_config(
        folder,
        run={"dir": str(run), "name": "run"},
        learner={"lr": 5e-3, "adam_epsilon": 1e-6, **learner},
        weight_bus={"heartbeat_s": 0.4, "deadline_s": 20, "collective_timeout_s": 10},
    )
    return plain.model_copy(update={"teachers": TEACHERS})


class Engine(bus_receiver.Engine):
    """One that holds the frozen weights already, with LoRA."""

    def __init__(self, held: Mapping[str, int]) -> None:
        super().__init__()
        self._held = held

    def load(self, version: int, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int]:
        return {**super().load(version, named_tensors), **self._held}


class Made:
    """A policy, its teachers, and what each should be, by float64 arithmetic of its own."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        self.config, self.ranks = config, Ranks(0, 1, CPU, mesh)
        self.policy: Policy
        self.optimizer: Optimizer
        self.policy, self.optimizer = built(config, mesh)
        self.beside = build_beside(config, self.policy)
        self.teachers: RefreshedTeachers = self.beside.teachers
        self.wanted = {name: self.values() for name in TEACHERS}

    def values(self) -> Values:
        return {name: tensor.double() for name, tensor in self.policy.named_full_tensors("float32")}

    def step(self, number: int) -> None:
        _, reason = train_on(batch_of(random_step(number), number), self.policy, self.optimizer, self.config)
        assert not reason
        self.beside.follow(self.policy, step=number)
        now, mean = self.values(), self.wanted["mean"]
        self.wanted["mean"] = {name: DECAY * mean[name] + (1 - DECAY) * now[name] for name in now}
        if number % 2 == 0:
            self.wanted["old"] = now

    @property
    def keeper(self) -> Checkpointer:
        return Checkpointer(self.config, self.policy, self.optimizer, self.beside.parts)

    @contextmanager
    def processes(self, incarnation: int = 1) -> Iterator[dict[str, Rollout]]:
        """A receiver of each teacher's bus."""
        addresses = self.teachers.open(self.ranks, run_id=RUN, incarnation=incarnation)
        assert addresses.keys() == TEACHERS.keys() and len({*addresses.values()}) == 2
        with ExitStack() as stack:
            stack.callback(self.teachers.close)
            ends = {}
            for name, address in addresses.items():
                bus = self.config.weight_bus.of_teacher(name)
                ends[name] = Rollout(address, f"teacher-{name}", Engine(self.policy.frozen_digests), config=bus)
                stack.callback(ends[name].halt)
                publisher = self.teachers.buses[name]._publisher
                assert publisher is not None
                until(lambda name=name, publisher=publisher: f"teacher-{name}" in publisher.members(), f"{name} joins")
            yield ends


@pytest.mark.parametrize("rank", [0, 2])
def test_every_refresh_is_what_it_should_be_and_is_proven(
    qwen3: Path, mesh: DeviceMesh, tmp_path: Path, rank: int
) -> None:
    """Five steps: `old` is a copy of each second version, `mean` an average over all; with LoRA of the adapters."""
    config = configured(qwen3, tmp_path, **({"lora": {"rank": rank, "alpha": 4.0}} if rank else {}))
    assert Setup.of(config, read_json(qwen3 / "config.json")).refreshed == 2
    made = Made(config, mesh)
    reports = []
    with made.processes() as ends:
        for step in range(6):
            if step:
                made.step(step)
            made.teachers.publish()
            reports.append(made.teachers.metrics(last=True))
            for name, end in ends.items():
                live, wanted = end.engine.live, made.wanted[name]
                exact = name == "old"
                assert live.keys() == wanted.keys() and all(PREFIX in one for one in live) is (rank > 0)
                worst = max(float((live[one].double() - wanted[one]).abs().max()) for one in wanted)
                assert worst == 0 if exact else worst <= 1e-6, (name, step, worst)
        assert ends["old"].engine.activated == [0, 2, 4] and ends["mean"].engine.activated == [*range(6)]
        assert made.teachers.versions == {"old": 4, "mean": 5}
    for step, report in enumerate(reports):
        refreshed = ["mean", "old"] if step % 2 == 0 else ["mean"]
        assert {name: report[f"teacher/{name}/version"] for name in refreshed} == dict.fromkeys(refreshed, step)
        assert all(report[f"teacher/{name}/{kind}"] for name in refreshed for kind in ("digests_equal", "members"))
        assert step % 2 == 0 or "teacher/old/version" not in report, "nothing went out that was there before"


def test_a_resumed_learner_has_the_teachers_of_its_checkpoint(qwen3: Path, mesh: DeviceMesh, tmp_path: Path) -> None:
    """Killed after step 5 with a checkpoint of step 3: its teachers go on as if nothing had happened."""
    config = configured(qwen3, tmp_path)
    made = Made(config, mesh)
    for step in range(1, 6):
        made.step(step)
        if step == 3:
            saved(made.keeper, step, teachers=made.teachers.versions)
    expected = {name: digests(made, name) for name in TEACHERS}
    again = Made(config, mesh)
    state = again.keeper.resume()
    assert state is not None and state["teachers"] == {"old": 2, "mean": 3}
    again.teachers.restore(state["teachers"])
    with again.processes(incarnation=2) as ends:
        for step in range(3, 6):
            if step > 3:
                again.step(step)
            again.teachers.publish()
            again.teachers.metrics(last=True)
        assert ends["old"].engine.activated == [2, 4] and ends["mean"].engine.activated == [3, 4, 5]
        for name, end in ends.items():
            assert {one: slice_digest(tensor) for one, tensor in end.engine.live.items()} == expected[name]


def test_teachers_of_a_run_have_buses_of_their_own() -> None:
    bus = WeightBus(transport="disk", folder="/shared/bus", port=4444, stage_in="engine")
    found = [bus.of_teacher(name) for name in TEACHERS]
    assert [(one.port, one.folder, one.stage_in) for one in found] == [
        (0, f"/shared/bus/teacher-{name}", "server") for name in TEACHERS
    ]
    assert WeightBus().of_teacher("old").folder is None


def digests(made: Made, name: str) -> dict[str, int]:
    part = made.beside.parts[f"teachers/{name}"]
    return {shard.name: slice_digest(shard.local) for shard in made.policy.layout.shards(part.weights())}
