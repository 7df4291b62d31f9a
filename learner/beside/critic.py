"""One rank's shard of the critic, its optimizer, and its step."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from configs import Config
from learner.beside.saving import load_part, save_part
from learner.beside.value_loss import ValueLoss
from learner.beside.value_model import build_value_model
from learner.optimizer import Optimizer, lr_at
from learner.policy.memory import Budget
from learner.policy.meshes import Meshes
from learner.rows import Row
from learner.step import accumulate_gradients, apply_update


class Critic:
    """Values before an update, and the update. All ranks call it with as many rows."""

    NAME = "critic"

    def __init__(self, config: Config, mesh: DeviceMesh | Meshes, device: torch.device, budget: Budget) -> None:
        """Load critic.path, or model.path. A collective. Raises PolicyError."""
        self.config = config.critic
        self._settings = config.learner.model_copy(update={"lr": config.critic.lr})
        self.model = build_value_model(config, mesh, device, budget)
        self.optimizer = Optimizer(self._settings, self.model)

    @torch.no_grad()
    def values(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[n] float32 of each row, the values before its tokens, in host memory. A collective."""
        return [self.model.forward(row.to(self.model.device), 1.0)[0].cpu() for row in rows]

    def train(self, rows: Sequence[Row], *, step: int, global_tokens: int) -> dict[str, float]:
        """critic.updates updates on rows that have values and returns; numbers for metrics.jsonl. A collective.

        An update whose loss or gradient is not finite is left out, on all ranks alike.
        """
        lr, loss = lr_at(step, self._settings), ValueLoss(self.config.clip, global_tokens)
        applied = 0
        for _ in range(self.config.updates):
            sums = accumulate_gradients(self.model, rows, loss, temperature=1.0, global_tokens=global_tokens)
            limit = self._settings.max_grad_norm
            applied += not apply_update(self.model, self.optimizer, sums, max_grad_norm=limit, lr=lr)
        return {
            "critic/vf_loss": sums.loss,
            "critic/vf_clipfrac": sums.values["clipped"] / max(1, global_tokens),
            "critic/vpred_mean": sums.values["values"] / max(1, global_tokens),
            "critic/grad_norm": sums.grad_norm,
            "critic/lr": lr,
            "critic/updates": float(applied),
        }

    def digests(self) -> dict[str, int]:
        """Of the float32 masters, by name. A collective."""
        return {f"critic.{name}": value for name, value in self.model.shard_digests("float32").items()}

    def save(self, folder: Path) -> None:
        """Write weights and moments below a checkpoint's folder."""
        save_part(folder / self.NAME, self.model, self.optimizer)

    def load(self, folder: Path) -> None:
        """Read them again."""
        load_part(folder / self.NAME, self.model, self.optimizer)
