"""The reference model, the critic and the teachers of a run, through one step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from learner.advantages import build_advantage, facts_of, need_tokens
from learner.beside.advantages import Judged, judge
from learner.beside.critic import Critic
from learner.beside.folders import check_folders
from learner.beside.pairs import PairReference
from learner.beside.reference import AdapterReference, Reference
from learner.beside.refreshed import RefreshedTeachers
from learner.beside.teacher import Teacher
from learner.checkpoints.parts import Part
from learner.policy.model import Policy
from learner.rows import Row
from replay.messages import Batch


class Beside:
    """The models beside a policy; without any, a batch goes through untouched."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        reference: Reference | AdapterReference | None = None,
        critic: Critic | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self._config, self._policy, self._advantage = config, policy, build_advantage(config.algorithm)
        self.reference, self.critic, self.teacher = reference, critic, teacher
        self.teachers = RefreshedTeachers(config, policy)
        of_pairs = reference if config.learner.facts.has_reference else None
        self.pairs = None if of_pairs is None else PairReference(of_pairs, policy)
        self.warmup_steps = 0 if critic is None else config.critic.warmup_steps
        """First steps, in which the critic learns alone; 0 without one."""

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
        if self.pairs is not None:
            rows = self.pairs.judge(batch, rows)
        elif self.reference is not None:
            found = zip(rows, self.reference.logprobs(rows), strict=True)
            rows = [replace(row, reference_logprobs=logprobs) for row, logprobs in found]
        if self.critic is not None:
            rows = [replace(row, values=values) for row, values in zip(rows, self.critic.values(rows), strict=True)]
        if not need_tokens(self._config.algorithm):
            return Judged(list(rows), advantages, {})
        return judge(batch, rows, self._advantage, self._config, self._policy)

    def shown(self, row: Row) -> Row:
        """A row on the device with what the teacher makes of it; untouched without one. A collective."""
        return row if self.teacher is None else self.teacher.show(row)

    def train_critic(self, rows: Sequence[Row], *, step: int, global_tokens: int) -> dict[str, float]:
        """The critic's part of a step; nothing without a critic or without tokens. A collective."""
        if self.critic is None or global_tokens == 0:
            return {}
        return self.critic.train(rows, step=step, global_tokens=global_tokens)

    def follow(self, policy: Policy, *, step: int) -> None:
        """After a step: what is refreshed from the policy is, in its own turn. A collective."""
        every = self._config.algorithm.reference_refresh_steps
        if self.reference is not None and every and step % every == 0:
            self.reference.refresh(policy)
        self.teachers.follow(step)

    def digests(self) -> dict[str, int]:
        """What the digest of a step covers beside the policy: the critic's float32 masters. A collective."""
        found = {} if self.critic is None else self.critic.model.shard_digests("float32")
        return {f"critic.{name}": value for name, value in found.items()}

    def state(self) -> dict[str, Any]:
        """Of a checkpoint's state.json; empty for a run that has nothing of it."""
        return {} if self.pairs is None else {"pairs": self.pairs.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What `state` gave."""
        if self.pairs is not None:
            self.pairs.restore(state.get("pairs", ()))

    @property
    def parts(self) -> dict[str, Part]:
        """What a checkpoint holds beside the policy, by folder.

        A reference that never changes is read from its own folder again.
        """
        parts = {}
        if self.reference is not None and self._config.algorithm.reference_refresh_steps:
            parts["reference"] = self.reference.part
        if self.critic is not None:
            parts["critic"] = Part(self.critic.model, self.critic.optimizer)
        return parts | self.teachers.parts


def build_beside(config: Config, policy: Policy) -> Beside:
    """Load what the configuration needs beside the policy, sharded over the same ranks. A collective.

    Raises:
        ConfigError: a folder does not suit the policy.
        PolicyError: a folder holds no model that the learner can use.
    """
    check_folders(config)
    reference: Reference | AdapterReference | None = None
    if config.has_reference:
        is_own = policy.lora is None or config.algorithm.reference_path is not None
        reference = (Reference if is_own else AdapterReference)(config, policy)
    critic = Critic(config, policy) if facts_of(config.algorithm).needs_critic else None
    teacher = Teacher(config, policy) if any(one.where == "learner" for one in config.teachers.values()) else None
    return Beside(config, policy, reference, critic, teacher)
