"""REINFORCE++: advantages normalised over the whole batch instead of a group."""

from learner.advantages.base import AdvantageInputs, Float64, declare, whiten


@declare(compares_within_groups=False)
def reinforce_plus_plus(inputs: AdvantageInputs) -> Float64:
    """Rewards whitened over all tokens in the loss. Hu 2025 (REINFORCE++), without discount.

    Every token of a trajectory has its reward as return, so a trajectory counts as often as it has tokens. A KL term
    comes in by `algorithm.kl_in: loss` or, before this, by `reward`.
    """
    return whiten(inputs.values, inputs.loss_tokens)


@declare(compares_within_groups=True, leaves_out_flat_groups=False)
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Float64:
    """Reward - group mean, then whitened over all tokens in the loss. Hu 2025, the form for groups of answers."""
    values = inputs.values
    return whiten(values - inputs.of_groups().mean(values), inputs.loss_tokens)
