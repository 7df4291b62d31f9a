"""Losses, one a file, chosen once by algorithm.loss."""

from configs.algorithm import Algorithm
from learner.losses.base import Loss, LossFactory, LossInputs, LossOutput
from learner.losses.cispo import cispo
from learner.losses.dppo_tv import dppo_tv
from learner.losses.gspo import gspo
from learner.losses.policy_gradient import policy_gradient
from learner.losses.ppo_clip import ppo_clip
from learner.losses.sapo import sapo

LOSSES: dict[str, LossFactory] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo_tv,
    "policy_gradient": policy_gradient,
}

__all__ = ["LOSSES", "Loss", "LossFactory", "LossInputs", "LossOutput", "build_loss"]


def build_loss(algorithm: Algorithm) -> Loss:
    """The loss of this configuration."""
    return LOSSES[algorithm.loss](algorithm)
