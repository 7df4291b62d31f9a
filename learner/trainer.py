"""One training step: rows, advantages, gradients, update. Without replay, bus or files."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from configs.errors import Contradiction
from configs.schema import Config
from learner import rules
from learner.advantages import Advantage, AdvantageInputs, advantages_of, build_advantage, drop_zero_advantages
from learner.advantages.base import Float64
from learner.beside.advantages import Judged
from learner.beside.beside import Beside
from learner.guards import Guards, GuardVerdict
from learner.objective import Objective
from learner.objective.aggregation import token_weights
from learner.objective.taught import TaughtObjective, WithTaught
from learner.optimizer import Optimizer, lr_at
from learner.pictures import PictureDecoder
from learner.policy.model import Policy
from learner.rows import BatchError, Row, lay_out, minibatches_of, sampled_part
from learner.step import Measure, StepSums, accumulate_gradients, apply_update
from replay.messages import Batch
from replay.routing import positions_of
from slipstream.families.experts import Experts, experts_of
from slipstream.runtime.variants import VariantFails

CRITIC_WARMUP = "critic_warmup"
"""Reason of an update that left the policy alone on purpose."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a rank computes for a batch."""

    advantages: NDArray[np.float32]
    """[N] of every trajectory of the whole batch."""
    rows: list[Row]
    """Of this rank, one a microbatch."""
    minibatches: list[tuple[slice, int]]
    """Rows of each, and its tokens in the loss over all ranks."""

    @property
    def global_tokens(self) -> int:
        """In the loss of the batch, over all ranks."""
        return sum(tokens for _, tokens in self.minibatches)


@dataclass(frozen=True, slots=True)
class Update:
    """One step's outcome, reduced over all ranks."""

    sums: StepSums
    """Over all updates."""
    advantages: NDArray[np.float32]
    lr: float
    reason: str
    """Why the weights did not move; empty where they did."""
    applied_updates: int = 0
    verdict: GuardVerdict = field(default_factory=GuardVerdict)
    """What the guards say."""
    beside: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the critic and the reference model."""
    from_data: bool = False
    """Whether answers were in the data, which have no advantages."""

    @property
    def values(self) -> dict[str, float]:
        """Numbers for metrics.jsonl."""
        return {
            **self.beside,
            **self.sums.metrics(),
            **self.verdict.values,
            "actor/grad_norm": self.sums.grad_norm,
            "actor/lr": self.lr,
            "actor/updates": float(self.applied_updates),
        } | self._of_advantages

    @property
    def _of_advantages(self) -> dict[str, float]:
        if self.from_data:
            return {}
        return {
            "critic/advantages/mean": float(self.advantages.mean()),
            "critic/advantages/max": float(self.advantages.max()),
            "critic/advantages/min": float(self.advantages.min()),
        }

    @property
    def applied(self) -> bool:
        return not self.reason


def prepare(
    batch: Batch,
    advantage: Advantage,
    config: Config,
    looker: PictureDecoder | None = None,
    experts: Experts | None = None,
) -> Prepared:
    """Advantages of the whole batch, token weights of each mini-batch, and this rank's rows.

    Where advantages need forwards over the tokens, all trajectories are laid out, and advantages wait for those.
    """
    algorithm, facts = config.algorithm, config.learner.facts
    advantages = advantages_of(advantage, inputs_of(batch))
    sampled, taught = slice(len(advantages)), slice(len(advantages), None)
    advantages = np.concatenate([advantages, np.zeros(batch.taught[0], np.float32)])
    keeps_all = facts.from_data or not drop_zero_advantages(algorithm)
    aggregation = "sequence" if facts.compares else algorithm.aggregation
    tokens = np.where((advantages != 0) | keeps_all, batch.all_loss_tokens, 0)
    tokens[taught] = batch.all_loss_tokens[taught]
    weights, parts = np.zeros(len(tokens), np.float32), minibatches_of(batch)
    for part in parts:
        own, constant = tokens[sampled][part.trajectories], config.rollout.max_new_tokens
        weights[sampled][part.trajectories] = token_weights(aggregation, own, constant=constant)
    weights[taught] = config.learner.sft.coef * token_weights("token", tokens[taught], constant=1)
    if looker is None and batch.picture_counts.size:
        raise BatchError(f"batch {batch.step}: has pictures, and model.path takes none")
    shown = looker.look(batch) if looker is not None else None
    routing = positions_of(batch, experts) if experts is not None and batch.routing.size else []
    rows = lay_out(batch, advantages, weights, config.learner.share_prefixes, shown, routing, config.scoring)
    behind = batch.num_microbatches - batch.taught[1]
    rows = [replace(row, is_taught=True) if row.number >= behind else row for row in rows]
    return Prepared(advantages, rows, [(part.microbatches, int(tokens[part.trajectories].sum())) for part in parts])


def inputs_of(batch: Batch) -> AdvantageInputs:
    """What advantages follow from, of the whole batch."""
    own = sampled_part(batch)
    return AdvantageInputs(rewards=own.all_rewards, groups=own.all_groups, loss_tokens=own.all_loss_tokens)


def nothing_expected(inputs: AdvantageInputs) -> Float64:
    """Advantages of answers that were not sampled."""
    return np.zeros(inputs.rewards.size)


def check_rewards(batch: Batch, advantage: Advantage) -> None:
    """Raises BatchError: algorithm.advantage does not take rewards of the batch. Raises VariantFails."""
    try:
        advantages_of(advantage, inputs_of(batch))
    except VariantFails:  # no fault of the batch
        raise
    except ValueError as error:
        raise BatchError(f"batch {batch.step}: {error}") from error


def objective_of(config: Config) -> Measure:
    """The objective of a run. Raises Contradiction: its variants do not go with each other or with the rest."""
    for problem in rules.problems(config, rules.chosen(config)):
        raise Contradiction(problem)
    learner, names = config.learner, [] if config.scoring is None else config.scoring.names
    if learner.facts.from_data:
        return TaughtObjective(learner.objective)
    sampled = Objective(config.algorithm, names)
    return sampled if learner.sft.data is None else WithTaught(sampled, learner.sft.coef)


class Trainer:
    """A rank's policy and optimizer, and how a batch becomes an update of them.

    `span` is entered with each phase by name: `lay_out`, `judge`, `gradients`, `apply`, `critic`. Guards may refuse an
    update, the critic's with it.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        optimizer: Optimizer,
        span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        beside: Beside | None = None,
        guards: Guards | None = None,
    ) -> None:
        self.config, self.policy, self.optimizer, self._span = config, policy, optimizer, span
        self.guards, self.looker = guards, PictureDecoder.of(policy.source)
        described = policy.model.transformer.config.to_dict()
        self.experts = experts_of(described) if config.replays_routing else None
        """Of which the engine's choices are replayed."""
        from_data = config.learner.facts.from_data
        self.advantage: Advantage = nothing_expected if from_data else build_advantage(config.algorithm)
        self.objective: Measure = objective_of(config)
        self.beside = beside or Beside(config, policy)

    def train_step(self, batch: Batch) -> Update:
        """Forward and backward over all rows, clip, AdamW. A collective; decides alike on all ranks."""
        learner, beside = self.config.learner, self.beside
        with self._span("lay_out"):
            work = prepare(batch, self.advantage, self.config, self.looker, self.experts)
        with self._span("judge"):
            judged = beside.judge(batch, work.rows, work.advantages, global_tokens=work.global_tokens)
        if batch.step <= beside.warmup_steps:
            update = Update(StepSums(Counter(), 0), judged.advantages, 0.0, CRITIC_WARMUP)
        else:
            lr = lr_at(batch.step, learner, idle=beside.warmup_steps)
            update = self._train_policy(batch, judged, work, lr)
        learnt: dict[str, float] = {}
        if not update.verdict.refusal:  # what a guard keeps from the policy is nothing for the critic either
            with self._span("critic"):
                learnt = beside.train_critic(judged.rows, step=batch.step, global_tokens=work.global_tokens)
        beside.follow(self.policy, step=batch.step)
        from_data = self.config.learner.facts.from_data
        return replace(update, beside=judged.values | learnt, from_data=from_data)

    def _train_policy(self, batch: Batch, judged: Judged, work: Prepared, lr: float) -> Update:
        """Each epoch an update on each mini-batch, until a guard ends the step or the policy has moved far enough."""
        target, done, reasons, verdict = self.config.learner.target_kl, list[StepSums](), list[str](), GuardVerdict()
        rows = self._against_start(judged.rows, work.global_tokens)
        for which, tokens in work.minibatches * self.config.learner.epochs:
            sums = self._gradients(rows[which], tokens)
            if done and target and sums.moved > target:
                self.policy.clear_gradients()
                break
            found, reason = self._apply(sums, batch, lr, is_first=not done)
            done, reasons, verdict = [*done, sums], [*reasons, reason], verdict.and_then(found)
            if verdict.first("roll_back", "stop"):
                break
        count = reasons.count("")
        return Update(StepSums.over(done), judged.advantages, lr, "" if count else reasons[0], count, verdict)

    def _against_start(self, rows: list[Row], global_tokens: int) -> list[Row]:
        """Rows with logprobs of the policy as it is, where later updates take ratios against it. A collective."""
        is_decoupled = self.config.algorithm.proximal == "current" and not self.config.learner.facts.from_data
        is_fixed = is_decoupled and self.config.learner.updates_per_step > 1
        if not is_fixed or global_tokens == 0:
            return rows
        with self._span("proximal"):
            found = self.policy.logprobs(rows, self.config.loss_temperature)
        return [replace(row, proximal_logprobs=own) for row, own in zip(rows, found, strict=True)]

    def _gradients(self, rows: Sequence[Row], global_tokens: int) -> StepSums:
        with self._span("gradients"):
            return accumulate_gradients(
                self.policy,
                rows,
                self.objective,
                temperature=self.config.loss_temperature,
                global_tokens=global_tokens,
                shown=self.beside.shown,
            )

    def _apply(self, sums: StepSums, batch: Batch, lr: float, *, is_first: bool) -> tuple[GuardVerdict, str]:
        """One update, where the guards let it pass; why it was not applied."""
        with self._span("apply"):
            verdict = GuardVerdict() if self.guards is None else self.guards.judge(sums, batch, is_first=is_first)
            norm, refusal = self.config.learner.max_grad_norm, verdict.refusal
            return verdict, apply_update(self.policy, self.optimizer, sums, max_grad_norm=norm, lr=lr, refusal=refusal)
