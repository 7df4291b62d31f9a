"""The reference model and the critic of a run, through one step."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from configs.schema import Config
from learner.advantages import build_advantage
from learner.beside.advantages import Judged, judge
from learner.policy.model import Policy
from learner.rows import Row
from replay.messages import Batch


class ReferenceModel(Protocol):
    """Logprobs of a frozen model, here or on ranks of its own.

    Every method is a collective of the policy's ranks.
    """

    def logprobs(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[n] float32 of each row, in host memory."""
        ...

    def refresh(self, policy: Policy) -> None:
        """Become a copy of the policy."""
        ...

    def save(self, folder: Path) -> None:
        """Write its state below the folder of a checkpoint. Raises OSError and ValueError."""
        ...

    def load(self, folder: Path) -> None:
        """Read it again. Raises OSError and ValueError."""
        ...

    def close(self) -> None:
        """Let ranks of its own end."""
        ...


class CriticModel(Protocol):
    """Values and their learning, here or on ranks of its own.

    Every method is a collective of the policy's ranks.
    """

    def values(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """[n] float32 of each row, in host memory."""
        ...

    def train(self, rows: Sequence[Row], *, step: int, global_tokens: int) -> dict[str, float]:
        """Learn the rows' returns; numbers for metrics.jsonl."""
        ...

    def digests(self) -> dict[str, int]:
        """Of the weights, by name."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and moments below the folder of a checkpoint. Raises OSError and ValueError."""
        ...

    def load(self, folder: Path) -> None:
        """Read them again. Raises OSError and ValueError."""
        ...

    def close(self) -> None:
        """Let ranks of its own end."""
        ...


class Beside:
    """The models beside a policy; without any, a batch goes through untouched."""

    def __init__(
        self, config: Config, policy: Policy, reference: ReferenceModel | None = None, critic: CriticModel | None = None
    ) -> None:
        self._config, self._policy, self._advantage = config, policy, build_advantage(config.algorithm)
        self.reference, self.critic = reference, critic

    def judge(
        self, batch: Batch, rows: Sequence[Row], advantages: NDArray[np.float32], *, global_tokens: int
    ) -> Judged:
        """The rows with reference logprobs, values and the advantages that need them. A collective.

        Args:
            batch: this rank's part.
            rows: of this rank.
            advantages: [N] from rewards alone.
            global_tokens: in the loss, over all ranks; without any, nothing runs and no collective starts.
        """
        if global_tokens == 0:
            return Judged(list(rows), advantages, {})
        if self.reference is not None:
            found = zip(rows, self.reference.logprobs(rows), strict=True)
            rows = [replace(row, reference_logprobs=logprobs) for row, logprobs in found]
        if self.critic is not None:
            rows = [replace(row, values=values) for row, values in zip(rows, self.critic.values(rows), strict=True)]
        if not self._config.algorithm.advantages_need_tokens:
            return Judged(list(rows), advantages, {})
        return judge(batch, rows, self._advantage, self._config, self._policy)

    def train_critic(self, rows: Sequence[Row], *, step: int, global_tokens: int) -> dict[str, float]:
        """The critic's part of a step; nothing without a critic or without tokens. A collective."""
        if self.critic is None or global_tokens == 0:
            return {}
        return self.critic.train(rows, step=step, global_tokens=global_tokens)

    @property
    def warmup_steps(self) -> int:
        """First steps, in which the critic learns alone; 0 without one."""
        return 0 if self.critic is None else self._config.critic.warmup_steps

    def follow(self, policy: Policy, *, step: int) -> None:
        """After a step: every algorithm.reference_refresh_steps the reference becomes the policy. A collective."""
        every = self._config.algorithm.reference_refresh_steps
        if self.reference is not None and every and step % every == 0:
            self.reference.refresh(policy)

    def digests(self) -> dict[str, int]:
        """What the digest of a step covers beside the policy: the critic. A collective."""
        return {} if self.critic is None else self.critic.digests()

    @property
    def parts(self) -> "list[ReferenceModel | CriticModel]":
        """What a checkpoint holds beside the policy.

        A reference that never changes is read from its folder again.
        """
        changes = self.reference is not None and self._config.algorithm.reference_refresh_steps > 0
        return [part for part in (self.reference if changes else None, self.critic) if part is not None]

    def close(self) -> None:
        """After the last step."""
        for model in (self.reference, self.critic):
            if model is not None:
                model.close()
