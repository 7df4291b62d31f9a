"""Losses, one a file, chosen once by algorithm.loss."""

from configs.algorithm import Algorithm
from learner.losses.base import Loss, LossInputs, LossOutput, NamedLoss
from learner.losses.decoupled_ppo import decoupled_ppo
from learner.losses.policy_gradient import policy_gradient
from learner.losses.ppo_clip import ppo_clip

LOSSES: dict[str, NamedLoss] = {
    "ppo_clip": ppo_clip,
    "decoupled_ppo": decoupled_ppo,
    "policy_gradient": policy_gradient,
}

__all__ = ["LOSSES", "Loss", "LossInputs", "LossOutput", "build_loss"]


def build_loss(algorithm: Algorithm) -> Loss:
    """The loss of this configuration."""
    loss = LOSSES[algorithm.loss]
    return lambda inputs: loss(inputs, algorithm)
