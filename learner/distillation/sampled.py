"""Distillation on the sampled tokens: one logprob a token is all that a teacher gives."""

from typing import Literal

from learner.corrections import High
from learner.distillation.base import DistillationInputs, DistillationOutput, declare
from learner.losses.base import log_ratio

LEAST_K3 = -5.0
"""Where the teacher finds a token likelier by more than e^5, the gradient of k3 grows no more."""


@declare(gives="logprobs", in_advantages=True)
def sampled_advantage(inputs: DistillationInputs) -> DistillationOutput:
    """Advantage of a token += coef (log teacher - log behaviour).

    On-policy distillation as a policy gradient (Gu et al. 2023, MiniLLM; Lu et al. 2025): over tokens of the policy
    that sampled its expectation is minus the gradient of KL(policy || teacher) at that place. Ratio, clip and
    correction are those of algorithm.loss. The log ratio is held within ±20.
    """
    assert inputs.teacher_logprobs is not None
    return DistillationOutput(kl=log_ratio(inputs.behaviour_logprobs, inputs.teacher_logprobs))


@declare(gives="logprobs")
def sampled(
    inputs: DistillationInputs, *, estimator: Literal["k2", "k3"] = "k2", truncate: High = 2.0
) -> DistillationOutput:
    """Loss += coef min(w, truncate) k(log policy - log teacher), with w = policy / behaviour without gradient.

    k2 is d^2 / 2, and in expectation its gradient is that of KL(policy || teacher); k3 is e^-d - 1 + d, and its is that
    of KL(teacher || policy) (Schulman 2020, learner/objective/kl.py). w makes both right for tokens of an older policy.
    d is held within ±20, where its gradient goes on: a token that the teacher would never say is the one to unlearn.
    """
    assert inputs.teacher_logprobs is not None
    logprobs, now = inputs.logprobs, inputs.logprobs.detach()
    weight = log_ratio(now, inputs.behaviour_logprobs).exp().clamp(max=truncate)
    held = log_ratio(now, inputs.teacher_logprobs)
    if estimator == "k3":
        held = held.clamp(min=LEAST_K3)
    delta = held + logprobs - now
    return DistillationOutput(kl=weight * (delta.square() / 2 if estimator == "k2" else (-delta).exp() - 1 + delta))
