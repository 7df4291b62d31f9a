"""Limits: health checks that stop a run, and guards with rules and actions."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import Field, field_validator

from configs.base import Section

Action = Literal["warn", "skip", "lower_lag", "roll_back", "stop"]
RULE = re.compile(rf"({'|'.join(get_args(Action))}) (above|below) (-?[0-9.]+(?:e-?[0-9]+)?)(?: for ([1-9][0-9]*))?")
GUARDS = ("nonfinite", "ess", "kl", "entropy", "reward", "same_length", "mismatch")
"""Keys of Limits that hold rules."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One bound and what follows when a value was beyond it for `steps` steps in a row.

    Example: `skip below 0.3 for 2` is Rule("skip", False, 0.3, 2).
    """

    action: Action
    is_above: bool
    bound: float
    steps: int = 1

    def is_broken_by(self, value: float) -> bool:
        """Whether the value is beyond the bound."""
        return value > self.bound if self.is_above else value < self.bound


def rules_of(text: str) -> tuple[Rule, ...]:
    """The rules of a guard; none for an empty text. Raises ValueError."""
    rules = []
    for part in text.split(",") if text.strip() else ():
        found = RULE.fullmatch(" ".join(part.split()))
        if found is None:
            raise ValueError(
                f"{part.strip()!r} is no rule; write ACTION above|below BOUND [for STEPS], such as 'skip below 0.3 for"
                f" 2', with an action of {', '.join(get_args(Action))}; several are separated by commas"
            )
        action, side, bound, steps = found.groups()
        rules.append(Rule(action, side == "above", float(bound), int(steps or 1)))  # type: ignore[arg-type]
    return tuple(rules)


class Limits(Section):
    """What stops a run that looks fine and is not, and guards. The first three and `skipped_steps` count consecutive
    steps, 0 switches one off. A guard is a text of rules, `ACTION above|below BOUND [for STEPS]`, separated by commas;
    an empty one switches it off. Actions: `warn`, `skip` the update, `lower_lag` by one, `roll_back` to the last good
    checkpoint, `stop` (docs/howto/guards.md)."""

    flat_reward_steps: int = Field(default=50, ge=0)
    """Every group's rewards equal (nothing to learn from)."""
    zero_gradient_steps: int = Field(default=5, ge=0)
    """Gradient norm exactly zero although advantages are not, or updates that change no weight."""
    nonfinite_steps: int = Field(default=3, ge=0)
    """Loss or gradient not finite; each such step is skipped and counted."""
    max_logprob_diff: float = Field(default=1e-3, gt=0)
    """In float32: mean difference of behaviour and trainer logprobs, over answers of lag 0, that stops the run."""
    max_logprob_diff_16bit: float = Field(default=0.1, gt=0)
    """The same where engine or learner computes in 16 bit."""
    mismatch: str = "warn above 3"
    """Guard: that difference over its mean in the first five steps that had answers of lag 0."""
    nonfinite: str = ""
    """Guard: 1 where loss or gradient is not finite, else 0; such an update is never applied."""
    ess: str = "warn below 0.7"
    """Guard: effective sample size of the importance weights, as a share (`training/ess`)."""
    kl: str = "warn above 0.1"
    """Guard: KL of behaviour and trained policy (`actor/ppo_kl_k3`)."""
    entropy: str = "warn below 0.2"
    """Guard: entropy over its own moving mean."""
    reward: str = "warn above 6, warn below -6"
    """Guard: the mean reward less its own moving mean, in deviations."""
    same_length: str = "warn above 0.95 for 5"
    """Guard: share of answers that have the most frequent length; answers that are cut all have one length."""
    skipped_steps: int = Field(default=5, ge=0)
    """Steps in a row whose updates guards have skipped; then the run stops."""
    roll_backs: int = Field(default=2, ge=0)
    """Most roll-backs of a run; one more stops it."""
    growth_window_s: float = Field(default=1800.0, gt=0)
    """Time over which growth of a process's memory, descriptors and threads is judged, from its second such window on;
    what grows without end is named in the log and the terminal (docs/metrics.md)."""
    growth_mib_per_h: float = Field(default=256.0, gt=0)
    """Steady growth of memory above this is named a leak; of descriptors or threads it is 12 an hour."""

    @field_validator(*GUARDS)
    @classmethod
    def _is_made_of_rules(cls, value: str) -> str:
        rules_of(value)
        return value

    def rules(self, guard: str) -> tuple[Rule, ...]:
        """Rules of one of GUARDS."""
        return rules_of(getattr(self, guard))

    def guards_that(self, action: Action) -> list[str]:
        """Guards with a rule of this action."""
        return [name for name in GUARDS if any(rule.action == action for rule in self.rules(name))]
