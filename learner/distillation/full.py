"""Distillation on the whole vocabulary, from a teacher inside the learner's ranks."""

from learner.distillation.base import Direction, DistillationInputs, DistillationOutput, Share, declare, sure_enough


@declare(gives="vocabulary")
def full(
    inputs: DistillationInputs, *, direction: Direction = "reverse", min_confidence: Share = 0.0
) -> DistillationOutput:
    """Loss += coef KL over the vocabulary, summed where both models' logits are made (learner/policy/logprobs.py).

    Tokens where the teacher gives its likeliest one less than `min_confidence` are left out.
    """
    assert inputs.divergence is not None, f"learner/beside shows the teacher to the output head ({direction})"
    return DistillationOutput(kl=inputs.divergence, kept=sure_enough(inputs, min_confidence))
