"""The reference model of a KL term: frozen weights, no optimizer."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from learner.beside.model import build_model, named
from learner.beside.saving import load_part, save_part
from learner.policy.memory import Budget
from learner.policy.meshes import Meshes
from learner.policy.model import Policy
from learner.policy.pretrained import fill, weight_files
from learner.rows import Row


class Reference:
    """One rank's shard of the reference model. All ranks call it with as many rows."""

    NAME = "reference"

    def __init__(self, config: Config, mesh: DeviceMesh | Meshes, device: torch.device, budget: Budget) -> None:
        """Load algorithm.reference_path, or model.path. A collective.

        Raises:
            PolicyError: the folder holds no model that the learner can use.
        """
        key = "model.path" if config.algorithm.reference_path is None else "algorithm.reference_path"
        folder = Path(config.algorithm.reference_path or config.model.path)
        self.temperature = config.rollout.temperature
        self.model = build_model(config, folder, mesh, device, budget, frozen=True, key=key)
        with named(key):
            fill(self.model.shards(), weight_files(folder), folder)

    @torch.no_grad()
    def logprobs(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[n] float32 of each row's tokens at the sampling temperature, in host memory. A collective."""
        found = [self.model.forward(row.to(self.model.device), self.temperature)[0] for row in rows]
        self.model.clear_gradients()  # there are none, but the root module holds what it has gathered until then
        return [logprobs.cpu() for logprobs in found]

    def refresh(self, policy: Policy) -> None:
        """Become a copy of the policy, which is sharded over the same ranks."""
        for mine, new in zip(self.model.shards(), policy.shards(), strict=True):
            mine.local.copy_(new.local)

    def save(self, folder: Path) -> None:
        """Write the weights, in the compute dtype, below a checkpoint's folder."""
        save_part(folder / self.NAME, self.model, None)

    def load(self, folder: Path) -> None:
        """Read them again."""
        load_part(folder / self.NAME, self.model, None)
