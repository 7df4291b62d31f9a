"""One training step: advantages, rows, gradients, update. What learns, without replay, bus or files."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from learner.advantages import Advantage, AdvantageInputs, advantages_of, build_advantage
from learner.guards import Guards, Verdict
from learner.objective import Objective
from learner.objective.aggregation import token_weights
from learner.optimizer import Optimizer, lr_at
from learner.policy.model import Policy
from learner.rows import Row, lay_out
from learner.step import StepSums, accumulate_gradients, apply_update
from replay.messages import Batch


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a rank computes for a batch."""

    advantages: NDArray[np.float32]
    """[N] of every trajectory of the whole batch."""
    rows: list[Row]
    """Of this rank, one a microbatch."""
    global_tokens: int
    """In the loss, over all ranks."""


@dataclass(frozen=True, slots=True)
class Update:
    """One step's outcome, reduced over all ranks."""

    sums: StepSums
    advantages: NDArray[np.float32]
    lr: float
    reason: str
    """Why the weights did not move; empty where they did."""
    verdict: Verdict = field(default_factory=Verdict)
    """What the guards say."""

    @property
    def values(self) -> dict[str, float]:
        """Numbers for metrics.jsonl."""
        return self.sums.metrics() | {
            **self.verdict.values,
            "actor/grad_norm": self.sums.grad_norm,
            "actor/lr": self.lr,
            "critic/advantages/mean": float(self.advantages.mean()),
            "critic/advantages/max": float(self.advantages.max()),
            "critic/advantages/min": float(self.advantages.min()),
        }

    @property
    def applied(self) -> bool:
        return not self.reason


def prepare(batch: Batch, advantage: Advantage, config: Config) -> Prepared:
    """Advantages and token weights of the whole batch, the same on every rank, and this rank's rows."""
    algorithm = config.algorithm
    inputs = AdvantageInputs(rewards=batch.all_rewards, groups=batch.all_groups, loss_tokens=batch.all_loss_tokens)
    advantages = advantages_of(advantage, inputs)
    tokens = np.where((advantages != 0) | (not algorithm.drop_zero_advantage), batch.all_loss_tokens, 0)
    weights = token_weights(algorithm.aggregation, tokens, constant=config.rollout.max_new_tokens)
    return Prepared(advantages, lay_out(batch, advantages, weights), int(tokens.sum()))


class Trainer:
    """A rank's policy and optimizer, and how a batch becomes an update of them.

    `span` is entered with the name of each phase: `lay_out`, `gradients`, `apply`. `guards` may refuse an update.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        optimizer: Optimizer,
        span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        guards: Guards | None = None,
    ) -> None:
        self.config, self.policy, self.optimizer, self._span = config, policy, optimizer, span
        self.guards = guards
        self.advantage = build_advantage(config.algorithm)
        self.objective = Objective(config.algorithm)

    def train_step(self, batch: Batch) -> Update:
        """Forward and backward over all rows, clip, AdamW. A collective; decides alike on all ranks."""
        learner = self.config.learner
        with self._span("lay_out"):
            work = prepare(batch, self.advantage, self.config)
        with self._span("gradients"):
            temperature = self.config.rollout.temperature
            sums = accumulate_gradients(
                self.policy, work.rows, self.objective, temperature=temperature, global_tokens=work.global_tokens
            )
        with self._span("apply"):
            lr = lr_at(batch.step, learner)
            verdict = self.guards.judge(sums, batch) if self.guards is not None else Verdict()
            reason = apply_update(
                self.policy, self.optimizer, sums,
                max_grad_norm=learner.max_grad_norm, lr=lr, refusal=verdict.refusal,
            )  # fmt: skip
        return Update(sums, work.advantages, lr, reason, verdict)
