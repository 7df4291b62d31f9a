"""SAPO: a soft gate in place of the clip."""

import torch

from configs.algorithm import Algorithm
from learner.losses.base import Loss, LossInputs, LossOutput


def sapo(algorithm: Algorithm) -> Loss:
    """Loss -A (4 / tau) sigmoid(tau (r - 1)), tau being sapo_tau_positive for A > 0 and sapo_tau_negative else.

    Gao et al. 2025 (SAPO): the gradient is that of the plain ratio at r = 1 and fades on both sides, faster for
    negative advantages (1.05 against 1.0 in the paper).
    """

    def loss(inputs: LossInputs) -> LossOutput:
        positive = inputs.advantages > 0
        tau = torch.where(positive, algorithm.sapo_tau_positive, algorithm.sapo_tau_negative)
        gate = torch.sigmoid(tau * (inputs.log_ratio().exp() - 1)) * 4 / tau
        return LossOutput(loss=-inputs.advantages * gate)

    return loss
