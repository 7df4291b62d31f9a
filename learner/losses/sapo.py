"""SAPO: a soft gate in place of the clip."""

from learner.losses.base import Above, LossInputs, LossOutput, declare


@declare(ratio="token")
def sapo(inputs: LossInputs, *, tau_positive: Above = 1.0, tau_negative: Above = 1.05) -> LossOutput:
    """Loss -A (4 / tau) sigmoid(tau (r - 1)), tau being tau_positive for A > 0 and tau_negative else.

    Gao et al. 2025 (SAPO): the gradient is that of the plain ratio at r = 1 and fades on both sides, faster for
    negative advantages (1.05 against 1.0 in the paper).
    """
    positive = inputs.advantages > 0
    tau = inputs.advantages.new_full(positive.shape, tau_negative).masked_fill(positive, tau_positive)
    gate = (tau * (inputs.log_ratio().exp() - 1)).sigmoid() * 4 / tau
    return LossOutput(loss=-inputs.advantages * gate)
