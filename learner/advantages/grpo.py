"""Group-relative advantages: GRPO and Dr. GRPO."""

from configs.algorithm import Algorithm
from learner.advantages.base import EPSILON, Advantage, AdvantageInputs, Float64


def grpo(_: Algorithm) -> Advantage:
    """(reward - group mean) / (group standard deviation + 1e-4).

    Shao et al. 2024 (DeepSeekMath), section 4.1. The paper leaves the kind of standard deviation open: this is the
    unbiased one (divisor n - 1), as in verl and TRL.

        Example: rewards [1, 0, 0, 0] of one group have mean 0.25 and std 0.5: advantages [1.5, -0.5, -0.5, -0.5].
    """

    def advantage(inputs: AdvantageInputs) -> Float64:
        values, groups = inputs.values, inputs.of_groups()
        return (values - groups.mean(values)) / (groups.std(values) + EPSILON)

    return advantage


def dr_grpo(_: Algorithm) -> Advantage:
    """Reward - group mean (Dr. GRPO, Liu et al. 2025).

    Dividing would favour questions that are too easy or too hard.
    The paper's other half is `algorithm.aggregation: constant`.
    """

    def advantage(inputs: AdvantageInputs) -> Float64:
        values = inputs.values
        return values - inputs.of_groups().mean(values)

    return advantage
