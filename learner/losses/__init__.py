"""Losses, one a file, chosen once by algorithm.loss."""

from collections.abc import Callable
from typing import Any

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
    "inputs",
    {loss.__name__: loss for loss in (ppo_clip, gspo, cispo, sapo, dppo_tv, policy_gradient)},
    undeclared=LossFacts(),
)
"""A loss that declares nothing is uncorrected, unless algorithm.correction is set."""
Loss = Callable[[LossInputs], LossOutput]
WANTED = (
    "return a value for each token as it comes from logprobs, neither summed nor averaged: that is done over the whole"
    " batch"
)


def build_loss(choice: Choice) -> tuple[Loss, Variant[LossFacts]]:
    """The loss that a configuration chooses, and what it declares. Raises BadValue."""
    variant = LOSSES.build(choice)
    guarded = variant.guarded(_problem_with)
    return lambda inputs: _output(guarded(inputs)), variant


def _output(given: Any) -> LossOutput:
    return given if isinstance(given, LossOutput) else LossOutput(loss=given)


def _problem_with(given: Any, inputs: LossInputs) -> str:
    """Why it is no loss of these [n] logprobs; empty where it is. A mean over a row would spread unnoticed."""
    output = _output(given)
    for name, values in (("loss", output.loss), ("clipped", output.clipped)):
        if not hasattr(values, "shape") and values is not output.clipped:
            return f"returned {type(values).__name__} instead of a tensor; {WANTED}"
        if values is not None and values.shape != inputs.logprobs.shape:
            return f"gave {name} of shape {list(values.shape)} for {len(inputs.logprobs)} tokens; {WANTED}"
    is_lost = inputs.logprobs.requires_grad and not output.loss.requires_grad
    return f"gave a loss without a gradient; {WANTED}" if is_lost else ""
