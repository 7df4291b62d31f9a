"""What two ranks see of a critic and a reference model beside the policy (two_ranks.py)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from learner.beside.beside import Beside, build_beside
from learner.checkpoints.checkpointer import Checkpointer, CheckpointError
from learner.optimizer import Optimizer
from learner.policy.model import Policy
from learner.trainer import Trainer
from tests.learner.recorded import batch_of, random_step
from tests.learner.tiny_models import built, make_config, saved
from weight_bus.digest import combined

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
BOTH = {"algorithm": {"kl": "k3", "kl_coef": 0.2, "reference_refresh_steps": 2}}
ADAPTERS = PPO | {"learner": {**SECTIONS["learner"], "lora": {"rank": 2}, "lr": 5e-3}}
CASES = {"ppo": PPO, "reference": BOTH, "adapters": ADAPTERS}


def configured(folder: Path, name: str, split: str = "1:2", parent: str = "beside") -> Config:
    """One of CASES, on two learner ranks."""
    run = {"dir": str(folder / parent), "name": name}
    return make_config(folder / MODEL, **{**SECTIONS, **CASES[name], "placement": {"split": split}, "run": run})


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
        return {"policy": self.policy.parameter_digest(), "critic": combined(self.beside.digests())}

    def resumed(self) -> dict[str, Any]:
        """Back to step 2, and on from there: the digest once more."""
        assert self.checkpoints.resume() is not None
        self.step(STEPS)
        return self.digest()

    def damaged(self) -> str:
        """What is said of a checkpoint whose part is gone."""
        folder = Path(self.config.run_dir) / "checkpoints" / "step_2"
        if self.policy.rank == 0:
            (folder / ("reference" if self.beside.critic is None else "critic") / "part.json").unlink()
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
    made = Made(config, policy, optimizer, build_beside(config, policy))
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
    return seen
