"""The critic of PPO: a language model with a scalar head, its loss, its optimizer, and its step.

With learner.lora its head and adapters of its own are in training.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from configs import Config
from learner.beside.reference import folder_of
from learner.objective import Measurements
from learner.optimizer import Optimizer, lr_at
from learner.policy.model import Policy, TokenModel, begin_adapters, shaped_policy
from learner.policy.pretrained import PolicyError, fill
from learner.rows import Row
from learner.step import accumulate_gradients, apply_update
from slipstream.weight_files import weight_files

HEAD = "lm_head.weight"
"""Name of the head's weights here; `score.weight` is what transformers calls those of a model with one label."""
SAVED_HEAD = "score.weight"


class ValueHead(torch.nn.Module):
    """One number from each hidden state, in float32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(1, hidden_size, device="meta"))

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, temperature: float, **_: Any) -> tuple[torch.Tensor]:
        """[n] float32 from [n, H]; what an output head is given besides is not used."""
        return (torch.mv(hidden.float(), self.weight.float()[0]),)


class ValueModel(TokenModel):
    """The root module: from a row to a value before each token in the loss."""

    def __init__(self, transformer: Any) -> None:
        super().__init__(transformer)
        transformer.lm_head = ValueHead(int(transformer.config.hidden_size))


class Critic:
    """Values before an update, and the update. All ranks call it with as many rows."""

    def __init__(self, config: Config, policy: Policy) -> None:
        """Load critic.path, or model.path, onto the policy's ranks. A collective. Raises PolicyError.

        The head is the folder's `score.weight`, or zeros: the first values are 0, and so advantages are rewards.
        """
        self.config = config.critic
        self._settings = config.learner.model_copy(update={"lr": config.critic.lr})
        with folder_of("critic.path", config.critic.path, config) as folder:
            self.model = shaped_policy(config, policy.mesh, policy.device, policy.budget, folder, ValueModel)
            files, shards = weight_files(folder, PolicyError), self.model.shards()
            (head,) = (shard for shard in shards if shard.name.endswith(HEAD))
            body = self.model.frozen() or [shard for shard in shards if shard is not head]
            if SAVED_HEAD in files:
                body.append(replace(head, name=SAVED_HEAD))
            else:
                head.local.zero_()
            fill(body, files, folder)
            begin_adapters(self.model, config)
        self.optimizer = Optimizer(self._settings, self.model)

    def values(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[n] float32 of each row, the values before its tokens, in host memory. A collective."""
        return self.model.logprobs(rows, 1.0)

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


class ValueLoss:
    """Squared error of values, clipped around those of the step's start.

    1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), mean over all tokens of the batch.
    Schulman et al. 2017 in the form of OpenAI's baselines and verl: past the clip range an error that shrinks further
    pulls no more, one that grows does.
    """

    def __init__(self, clip: float, global_tokens: int) -> None:
        self._clip, self._share = clip, 1 / max(1, global_tokens)

    def __call__(self, row: Row, values: torch.Tensor) -> tuple[torch.Tensor, Measurements]:
        """The row's share of the loss, with a gradient, and sums over its tokens.

        Args:
            row: with `values` of the start of the step and `returns`.
            values: [n] float32 of the critic in training.
        """
        assert row.values is not None and row.returns is not None
        near = values.clamp(row.values - self._clip, row.values + self._clip)
        free, bounded = (values - row.returns).square(), (near - row.returns).square()
        loss = (torch.maximum(free, bounded) / 2).sum() * self._share
        now = values.detach()
        return loss, {
            "loss": loss.detach(),
            "clipped": (bounded > free).sum(),
            "values": now.sum(),
            "tokens": torch.full((), len(now), device=now.device),
        }
