"""REINFORCE++: advantages normalised over the whole batch instead of a group."""

from configs.algorithm import Algorithm
from learner.advantages.base import Advantage, AdvantageInputs, Float64, whiten


def reinforce_plus_plus(_: Algorithm) -> Advantage:
    """Rewards whitened over all tokens in the loss. Hu 2025 (REINFORCE++), without discount.

    Every token of a trajectory has its reward as return, so a trajectory counts as often as it has tokens. A KL term
    comes in by `algorithm.kl_in: loss` or, before this, by `reward`.
    """

    def advantage(inputs: AdvantageInputs) -> Float64:
        return whiten(inputs.values, inputs.loss_tokens)

    return advantage


def reinforce_plus_plus_baseline(_: Algorithm) -> Advantage:
    """Reward - group mean, then whitened over all tokens in the loss. Hu 2025, the form for groups of answers."""

    def advantage(inputs: AdvantageInputs) -> Float64:
        values = inputs.values
        return whiten(values - inputs.of_groups().mean(values), inputs.loss_tokens)

    return advantage
