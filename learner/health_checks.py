"""Silent wrongness is an error (invariant 8): counts steps that look fine and are not, and stops the run."""

import math
from collections import Counter
from collections.abc import Mapping

from configs.schema import Config


class SilentlyWrong(RuntimeError):
    """Training has no effect, or the wrong one; names the symptom and the remedy."""


class HealthChecks:
    """Consecutive counts per symptom. All ranks see the same numbers, so all ranks stop together."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.consecutive: Counter[str] = Counter()

    def check(self, step: int, values: Mapping[str, float], *, applied: bool, has_advantage: bool) -> None:
        """Look at the metrics of a step, reduced over all ranks.

        Args:
            step: the step that was just made.
            values: its metrics.
            applied: whether the update was applied (not skipped for a value that is not finite).
            has_advantage: whether any advantage of the batch is not zero.

        Raises:
            SilentlyWrong: a limit of the `limits` section is reached.
        """
        norm = values.get("actor/grad_norm", 0.0)
        nothing = (
            "every group's rewards are equal, so there is nothing to learn; look at the reward function"
            f" {self.config.reward.function!r} and at the answers in the run folder"
        )
        zero = "the gradient is exactly zero although advantages are not; is every token clipped or masked?"
        broken = f"loss or gradient is not finite (norm {norm}); lower learner.lr or look at the rewards"
        for name, hit, meaning in (
            ("flat_reward_steps", not has_advantage, nothing),
            ("zero_gradient_steps", applied and has_advantage and norm == 0.0, zero),
            ("nonfinite_steps", has_advantage and not applied, broken),
        ):
            self.consecutive[name] = self.consecutive[name] + 1 if hit else 0
            limit = getattr(self.config.limits, name)
            if limit and self.consecutive[name] >= limit:
                raise SilentlyWrong(f"step {step}: for {limit} steps in a row (limits.{name}) {meaning}")
        self._check_on_policy(step, values)

    def _check_on_policy(self, step: int, values: Mapping[str, float]) -> None:
        """At lag 0 in float32 the behaviour policy is the trainer's policy, to rounding."""
        exact = self.config.rollout.dtype == self.config.learner.compute_dtype == "float32"
        difference = values.get("training/rollout_logprobs_diff_mean")
        if self.config.replay.async_lag > 0 or not exact or difference is None or math.isnan(difference):
            return
        if difference > self.config.limits.max_logprob_diff:
            raise SilentlyWrong(
                f"step {step}: at lag 0 the engine's logprobs differ from the learner's by {difference:.2e} on average"
                f" (limits.max_logprob_diff {self.config.limits.max_logprob_diff:g}); the engine does not run the"
                " policy that is trained"
            )
