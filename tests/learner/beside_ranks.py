"""What two ranks see of a critic, a reference model and refreshed teachers beside the policy (two_ranks.py)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from configs.teachers import Teacher
from learner.beside.beside import Beside, build_beside
from learner.checkpoints.checkpointer import Checkpointer, CheckpointError
from learner.layout import digests
from learner.optimizer import Optimizer
from learner.policy.model import Policy
from learner.ranks import Ranks
from learner.trainer import Trainer
from tests.learner.recorded import batch_of, random_step
from tests.learner.tiny_models import CPU, built, make_config, saved
from tests.support.bus_receiver import RUN, Rollout
from tests.support.waiting import until
from weight_bus.digest import combined, slice_digest

STEPS = 3
MODEL = "one_layer"
"""Folder of the model; its rows do not divide by two."""
SECTIONS: dict[str, dict[str, Any]] = {
    "learner": {"adam_epsilon": 1e-6, "batch_deadline_s": 60},
}
PPO = {
    "algorithm": {"advantage": "gae", "kl": "k3", "kl_in": "reward", "kl_coef": 0.05, "reference_refresh_steps": 2},
    "critic": {"lr": 1e-3, "updates": 2, "lam": 0.95},
}
DIRECTION = {"distillation": {"full": {"direction": "forward"}}}
BOTH = {"algorithm": {"kl": "k3", "kl_coef": 0.2, "reference_refresh_steps": 2, **DIRECTION}}
"""A reference, and the policy's first weights as a teacher in the ranks."""
ADAPTERS = PPO | {"learner": {**SECTIONS["learner"], "lora": {"rank": 2}, "lr": 5e-3}}
CASES: dict[str, dict[str, Any]] = {"ppo": PPO, "reference": BOTH, "adapters": ADAPTERS, "teachers": {}}
PARTS = {"ppo": "critic", "reference": "reference", "adapters": "critic", "teachers": "teachers/mean"}
"""What is taken out of a checkpoint of each case."""
TEACHERS = {"old": Teacher(of="lagged", every=2), "mean": Teacher(of="average", every=1, decay=0.5)}
BUS = {"heartbeat_s": 0.4, "deadline_s": 60, "collective_timeout_s": 20, "bucket_bytes": 4096}


def configured(folder: Path, name: str, split: str = "1:2", parent: str = "beside") -> Config:
    """One of CASES, on two learner ranks."""
    run = {"dir": str(folder / parent), "name": name}
    sections = {**SECTIONS, **CASES[name], "placement": {"split": split}, "run": run, "weight_bus": BUS}
    if name == "reference":
        sections["teachers"] = {"first": {"path": str(folder / MODEL), "where": "learner"}}
    return make_config(folder / MODEL, **sections)


@dataclass
class Made:
    """One rank's models."""

    config: Config
    policy: Policy
    optimizer: Optimizer
    beside: Beside

    def step(self, number: int) -> dict[str, float]:
        place = {"rank": self.policy.rank, "world_size": self.policy.world_size, "num_microbatches": 2}
        trainer = Trainer(self.config, self.policy, self.optimizer, beside=self.beside)
        update = trainer.train_step(batch_of(random_step(number), number, **place))
        assert not update.reason
        if number == 2:
            saved(self.checkpoints, 2)
        return update.values

    @property
    def checkpoints(self) -> Checkpointer:
        return Checkpointer(self.config, self.policy, self.optimizer, self.beside.parts)

    def digest(self) -> dict[str, Any]:
        made = {"policy": self.policy.parameter_digest(), "critic": combined(self.beside.digests())}
        layout, group = self.policy.layout, self.policy.group
        held = {part: layout.shards(its.weights()) for part, its in self.beside.teachers.parts.items()}
        return made | {part: combined(digests(shards, torch.float32, group)) for part, shards in held.items()}

    def sent(self, rank: int) -> dict[str, Any]:
        """What reaches a process of each teacher from both ranks, and what the bus says of it (rank 0)."""
        teachers = self.beside.teachers
        ranks = Ranks(rank, self.policy.world_size, CPU, self.policy.mesh)
        addresses = teachers.open(ranks, run_id=RUN, incarnation=1)
        ends = {n: Rollout(at, n, config=self.config.weight_bus.of_teacher(n)) for n, at in addresses.items()}
        for name in ends:
            publisher = teachers.buses[name]._publisher
            assert publisher is not None
            until(lambda name=name, publisher=publisher: name in publisher.members(), f"{name} joins")
        teachers.publish()
        wanted = {name: bus.digests() for name, bus in teachers.buses.items()}
        senders = [len({lane.sender for lane in bus._lanes}) for bus in teachers.buses.values()]
        found = {"senders": senders, "versions": teachers.versions, "metrics": teachers.metrics(last=True)}
        for name, end in ends.items():
            assert {one: slice_digest(tensor) for one, tensor in end.engine.live.items()} == wanted[name]
        teachers.close()
        return found

    def resumed(self) -> dict[str, Any]:
        """Back to step 2, and on from there: the digest once more."""
        assert self.checkpoints.resume() is not None
        self.step(STEPS)
        return self.digest()

    def damaged(self) -> str:
        """What is said of a checkpoint whose part is gone."""
        folder = Path(self.config.run_dir) / "checkpoints" / "step_2"
        if self.policy.rank == 0:
            (folder / PARTS[self.config.run.name] / "part.json").unlink()
            (folder / "COMPLETE").write_text('{"files": {}}')
        torch.distributed.barrier(self.policy.group)
        try:
            self.checkpoints.load(folder)
        except CheckpointError as error:
            return str(error)
        return ""


def train(config: Config, mesh: DeviceMesh) -> tuple[Made, list[dict[str, float]]]:
    """STEPS steps, with a checkpoint of step 2, and the metrics of each."""
    policy, optimizer = built(config, mesh)
    taught = config.model_copy(update={"teachers": TEACHERS}) if config.run.name == "teachers" else config
    made = Made(config, policy, optimizer, build_beside(taught, policy))
    return made, [made.step(number) for number in range(1, STEPS + 1)]


def observe(folder: Path, mesh: DeviceMesh) -> dict[str, Any]:
    """Every case."""
    seen: dict[str, Any] = {}
    for name in CASES:
        made, metrics = train(configured(folder, name), mesh)
        seen[name] = {"metrics": metrics, "digest": made.digest()}
        full = dict(made.policy.named_full_tensors("float32"))
        if made.policy.rank == 0:
            save_file(full, folder / f"beside_{name}.safetensors")
        seen[name] |= {"resumed": made.resumed(), "damaged": made.damaged()}
    seen["sent"] = made.sent(made.policy.rank)
    return seen
