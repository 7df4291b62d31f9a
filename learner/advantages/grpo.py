"""Group-relative advantages: GRPO and Dr. GRPO."""

from typing import Any

from configs import Config
from learner.advantages.base import EPSILON, AdvantageInputs, Float64, declare


def _blows_a_penalty_up(config: Config, _: dict[str, Any]) -> str:
    if config.algorithm.kl_in != "reward":
        return ""
    return (
        "its standard deviation blows the KL term of a group with equal rewards up to full strength (algorithm.kl_in"
        " 'reward'); take advantage 'dr_grpo' or 'rloo', or kl_in 'loss'"
    )


@declare(compares_within_groups=True, refuses=_blows_a_penalty_up)
def grpo(inputs: AdvantageInputs) -> Float64:
    """(reward - group mean) / (group standard deviation + 1e-4).

    Shao et al. 2024 (DeepSeekMath), section 4.1. The paper leaves the kind of standard deviation open: this is the
    unbiased one (divisor n - 1), as in verl and TRL.

        Example: rewards [1, 0, 0, 0] of one group have mean 0.25 and std 0.5: advantages [1.5, -0.5, -0.5, -0.5].
    """
    values, groups = inputs.values, inputs.of_groups()
    return (values - groups.mean(values)) / (groups.std(values) + EPSILON)


@declare(compares_within_groups=True)
def dr_grpo(inputs: AdvantageInputs) -> Float64:
    """Reward - group mean (Dr. GRPO, Liu et al. 2025).

    Dividing would favour questions that are too easy or too hard.
    The paper's other half is `algorithm.aggregation: constant`.
    """
    values = inputs.values
    return values - inputs.of_groups().mean(values)
