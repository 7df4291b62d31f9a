"""Losses, one a file, chosen once by algorithm.loss."""

from collections.abc import Callable

from configs.errors import SlipstreamError
from configs.variants import Choice
from learner.losses.base import LossFacts, LossInputs, LossOutput, declare
from learner.losses.cispo import cispo
from learner.losses.dppo_tv import dppo_tv
from learner.losses.gspo import gspo
from learner.losses.policy_gradient import policy_gradient
from learner.losses.ppo_clip import ppo_clip
from learner.losses.sapo import sapo
from slipstream.runtime.variants import Kind, Variant

LOSSES: Kind[LossFacts] = Kind(
    "algorithm.loss",
    {loss.__name__: loss for loss in (ppo_clip, gspo, cispo, sapo, dppo_tv, policy_gradient)},
    undeclared=LossFacts(),
)
"""A loss that declares nothing is uncorrected, unless algorithm.correction is set."""
Loss = Callable[[LossInputs], LossOutput]

__all__ = ["LOSSES", "Loss", "LossError", "LossFacts", "LossInputs", "LossOutput", "build_loss", "declare"]


class LossError(SlipstreamError, ValueError, code="SLIP-LEARN-02"):
    """The losses, advantages and corrections of the algorithm section cannot be used; the message names the key."""


def build_loss(choice: Choice) -> tuple[Loss, Variant[LossFacts]]:
    """The loss that a configuration chooses, and what it declares. Raises BadValue."""
    variant = LOSSES.build(choice)

    def checked(inputs: LossInputs) -> LossOutput:
        """Raises LossError: a loss of a user gave no value for each token; a mean over a row would spread unnoticed."""
        given = variant.call(inputs)
        output = given if isinstance(given, LossOutput) else LossOutput(loss=given)
        if problem := _problem_with(output, inputs):
            raise LossError(
                f"algorithm.loss: {variant.name!r} {problem}; return a value for each token as it comes from logprobs,"
                " neither summed nor averaged: that is done over the whole batch"
            )
        return output

    return variant.call if variant.is_built_in else checked, variant


def _problem_with(output: LossOutput, inputs: LossInputs) -> str:
    """Why it is no loss of these [n] logprobs; empty where it is."""
    for name, values in (("loss", output.loss), ("clipped", output.clipped)):
        if not hasattr(values, "shape") and values is not output.clipped:
            return f"returned {type(values).__name__} instead of a tensor"
        if values is not None and values.shape != inputs.logprobs.shape:
            return f"gave {name} of shape {list(values.shape)} for {len(inputs.logprobs)} tokens"
    is_lost = inputs.logprobs.requires_grad and not output.loss.requires_grad
    return "gave a loss without a gradient" if is_lost else ""
