"""Distillation on the teacher's likeliest tokens, all others as one."""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from learner.distillation.base import Direction, DistillationInputs, DistillationOutput, Share, declare, sure_enough

if TYPE_CHECKING:
    from torch import Tensor

Some = Annotated[int, Field(ge=1)]
LEAST_TAIL = 1e-5
"""What the tail counts at least: a smaller one is rounding of the sum over the others."""


@declare(gives="top")
def top_k(
    inputs: DistillationInputs, *, k: Some, direction: Direction = "reverse", min_confidence: Share = 0.0
) -> DistillationOutput:
    """Loss += coef KL over k + 1 outcomes: the teacher's k likeliest tokens, and any other token.

    Merging outcomes never raises a KL divergence, so this is a lower bound of the one over the vocabulary, and equal to
    it at k = vocabulary. Without the tail the k probabilities are no distribution, and a policy could lower the sum by
    moving mass out of them. Tokens where the teacher gives its likeliest one less than `min_confidence` are left out.
    """
    assert inputs.top_logprobs is not None and inputs.teacher_top is not None, "replay asks teachers for them"
    if inputs.teacher_top.shape[1] != k:
        raise ValueError(f"algorithm.distillation: top_k of {k}, and the batch has {inputs.teacher_top.shape[1]}")
    ours, theirs = with_tail(inputs.top_logprobs), with_tail(inputs.teacher_top)
    kl = ours.exp() * (ours - theirs) if direction == "reverse" else theirs.exp() * (theirs - ours)
    return DistillationOutput(kl=kl.sum(1), kept=sure_enough(inputs, min_confidence))


def with_tail(logprobs: "Tensor") -> "Tensor":
    """[n, k + 1] from [n, k]: the last is of all other tokens together."""
    from torch import cat  # here, so that a launcher may look at distillations without torch

    return cat([logprobs, (1 - logprobs.exp().sum(1, keepdim=True)).clamp(min=LEAST_TAIL).log()], 1)
