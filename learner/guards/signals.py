"""Signals of guards: one number a guard and step, from measurements and batch.

All of it is known before the update is applied and equal on all ranks: measurements are gathered and reduced in rank
order, and every rank has the rewards and lengths of the whole batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from configs.schema import Config
from learner.advantages import facts_of
from learner.distillation import build_distillation
from learner.rows import sampled_part
from learner.step import StepSums
from replay.messages import Batch

MIN_TOKENS = 256
"""Of answers of lag 0: the mean of fewer is too noisy to compare in 16 bit or with the first steps."""
BASE_STEPS = 5
"""First steps with that many tokens, whose mean mismatch later steps are compared with."""
LEAST_BASE = 0.01
"""Of a bound: a smaller mean of the first steps counts as this much, or a ratio would be of rounding alone."""
LEAST_BASE_16BIT = 0.1
MEMORY = 20
"""Values that a moving mean remembers: the weight of a new one is 1/MEMORY, more before it has seen as many."""
WARM_UP = 10
"""Values before the mean counts as known."""

Signals = Mapping[str, float | None]
"""By guard; None says nothing: there was no such token, or the moving mean is not known yet."""
NAMES = {
    "ess": "training/ess",
    "kl": "actor/ppo_kl_k3",
    "max_logprob_diff": "training/rollout_logprobs_diff_lag0_mean",
    "mismatch": "training/mismatch_ratio",
    "entropy": "actor/entropy_ratio",
    "reward": "critic/rewards/deviations",
    "same_length": "response_length/same_ratio",
    "nonfinite": "a loss or gradient that is not finite",
}
"""What a guard's number is called; a metric, but for the last."""
MADE_HERE = ("mismatch", "entropy", "reward", "same_length")
"""Guards whose number only guards compute: rank 0 writes them to metrics.jsonl."""


@dataclass(slots=True)
class Moving:
    """Exponential moving mean and variance (West 1979); plain ones until MEMORY values have come."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    @property
    def is_known(self) -> bool:
        """Whether enough values have come to compare with."""
        return self.count >= WARM_UP

    def add(self, value: float) -> None:
        """Take in a finite value."""
        self.count = min(self.count + 1, MEMORY)
        share, difference = 1 / self.count, value - self.mean
        self.mean += share * difference
        self.variance = (1 - share) * (self.variance + share * difference**2)

    def distance(self, value: float, noise: float) -> float:
        """A value less the mean, in deviations; `noise` is the variance that the value has by itself."""
        deviation = math.sqrt(self.variance + noise)
        return (value - self.mean) / deviation if deviation else 0.0


class SignalHistory:
    """What a run has been like so far; `state` goes into checkpoints."""

    def __init__(self, config: Config) -> None:
        self.from_data = config.learner.facts.from_data
        """Whether nothing was sampled: then guards of rewards, lag and engines say nothing."""
        self.is_16bit = {config.rollout.dtype, config.learner.compute_dtype} != {"float32"}
        self.compares_within_groups = facts_of(config.algorithm).compares_within_groups
        taught = build_distillation(config.algorithm)
        self.is_taught, self.by_rewards = taught is not None, taught is None or taught.task > 0
        """Whether teachers give equal rewards a gradient, and whether rewards give any."""
        limits = config.limits
        self.max_diff = limits.max_logprob_diff_16bit if self.is_16bit else limits.max_logprob_diff
        self.entropy, self.reward = Moving(), Moving()
        self.base = Moving()
        """Mismatch of the first BASE_STEPS steps."""

    @property
    def least_base(self) -> float:
        """The mean mismatch of the first steps counts as this at least."""
        return self.max_diff * (LEAST_BASE_16BIT if self.is_16bit else LEAST_BASE)

    def signals(self, sums: StepSums, batch: Batch, *, is_first: bool = True) -> Signals:
        """The numbers of an update; those of a step's first are taken in for later steps.

        Later ones say nothing but whether they are finite and how far the policy is from the one that sampled: of the
        rest, the batch was judged before, or the updates before have changed it.
        """
        found: dict[str, float | None] = dict.fromkeys(NAMES)
        has_tokens = sums.global_tokens > 0
        is_finite = not has_tokens or (math.isfinite(sums.loss) and math.isfinite(sums.grad_norm))
        if has_tokens:
            found["nonfinite"] = found["nonfinite_steps"] = float(not is_finite)
        if is_first and self.from_data and has_tokens:
            found["zero_gradient_steps"] = float(sums.grad_norm == 0.0)
        elif is_first and not self.from_data:
            found |= self._of_batch(sums, sampled_part(batch))
        if not is_finite or not has_tokens or self.from_data:
            return found
        measured = sums.metrics()
        if NAMES["ess"] not in measured:  # no sampled token is in the loss
            return found
        for guard in ("ess", "kl"):
            found[guard] = measured[NAMES[guard]]
        if not is_first:
            return found
        found["entropy"] = self._entropy(measured["actor/entropy"])
        if sums.fresh_tokens:
            found |= self._mismatch(measured[NAMES["max_logprob_diff"]], sums.fresh_tokens)
        return found

    def _of_batch(self, sums: StepSums, batch: Batch) -> dict[str, float | None]:
        is_flat, lengths = self._is_flat(batch), batch.all_loss_tokens
        says_nothing = is_flat and not self.is_taught
        is_idle = is_flat and self.by_rewards
        found: dict[str, float | None] = {"flat_reward_steps": float(is_idle), "reward": self._reward(batch)}
        found["same_length"] = float(np.bincount(lengths).max() / len(lengths))
        # without a token in the loss, though answers differ, all are masked; a mini-batch may be flat by itself
        if sums.global_tokens or not (says_nothing or len(batch.minibatches) > 1):
            found["zero_gradient_steps"] = float(sums.grad_norm == 0.0 and not says_nothing)
        return found

    def _is_flat(self, batch: Batch) -> bool:
        """Whether all rewards are equal that are compared with each other: of each group, or of the whole batch."""
        if not self.compares_within_groups:
            return float(np.ptp(batch.all_rewards)) == 0.0  # even a critic has nothing to compare then
        low, high = np.full(len(batch.group_ids), np.inf), np.full(len(batch.group_ids), -np.inf)
        np.minimum.at(low, batch.all_groups, batch.all_rewards)
        np.maximum.at(high, batch.all_groups, batch.all_rewards)
        return bool((low >= high).all())

    def _reward(self, batch: Batch) -> float | None:
        """Deviations between the mean reward and its moving mean. A mean over groups has a variance of its own:
        without it, the first success after many zeros would be infinitely far away."""
        rewards, groups = batch.all_rewards.tolist(), len(batch.group_ids)
        mean = math.fsum(rewards) / len(rewards)
        noise = math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards) / groups
        distance = self.reward.distance(mean, noise) if self.reward.is_known else None
        self.reward.add(mean)
        return distance

    def _entropy(self, entropy: float) -> float | None:
        usual = self.entropy.mean
        ratio = entropy / usual if self.entropy.is_known and usual > 0 else None
        self.entropy.add(entropy)
        return ratio

    def _mismatch(self, difference: float, tokens: float) -> dict[str, float | None]:
        """Of answers whose every token was sampled by the version in training: nothing but the two implementations
        can make their logprobs differ."""
        found: dict[str, float | None] = {}
        if tokens >= MIN_TOKENS or not self.is_16bit:
            found["max_logprob_diff"] = difference
        if tokens >= MIN_TOKENS:
            if self.base.count < BASE_STEPS:
                self.base.add(difference)
            else:
                found["mismatch"] = difference / max(self.base.mean, self.least_base)
        return found

    def state(self) -> dict[str, list[float]]:
        """For a checkpoint."""
        parts = {"entropy": self.entropy, "reward": self.reward, "base": self.base}
        return {name: [part.mean, part.variance, part.count] for name, part in parts.items()}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Go on from a checkpoint."""
        for name, (mean, variance, count) in state.items():
            setattr(self, name, Moving(mean, variance, int(count)))
