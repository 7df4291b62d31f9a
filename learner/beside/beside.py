"""The reference model and the critic of a run, through one step."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from learner.advantages import build_advantage
from learner.beside.advantages import Judged, judge
from learner.beside.critic import Critic
from learner.beside.folders import check_folders
from learner.beside.reference import Reference
from learner.policy.model import Policy
from learner.rows import Row
from replay.messages import Batch


class Beside:
    """The models beside a policy; without any, a batch goes through untouched."""

    def __init__(
        self, config: Config, policy: Policy, reference: Reference | None = None, critic: Critic | None = None
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
    def parts(self) -> list[Reference | Critic]:
        """What a checkpoint holds beside the policy.

        A reference that never changes is read from its folder again.
        """
        changes = self.reference is not None and self._config.algorithm.reference_refresh_steps > 0
        return [part for part in (self.reference if changes else None, self.critic) if part is not None]


def build_beside(config: Config, policy: Policy) -> Beside:
    """Load what the configuration needs beside the policy, sharded over the same ranks. A collective.

    Raises:
        ConfigError: a folder does not suit the policy.
        PolicyError: a folder holds no model that the learner can use.
    """
    check_folders(config)
    place = (policy.mesh, policy.device, policy.budget)
    reference = Reference(config, *place) if config.algorithm.kl != "none" else None
    critic = Critic(config, *place) if config.algorithm.advantage == "gae" else None
    return Beside(config, policy, reference, critic)
