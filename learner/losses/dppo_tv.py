"""DPPO-TV: a trust region on probabilities instead of ratios."""

from configs.algorithm import Algorithm
from learner.losses.base import Loss, LossInputs, LossOutput


def dppo_tv(algorithm: Algorithm) -> Loss:
    """Loss -A r where the token may still move, plus dppo_kl (log r)^2; 0 for a token that has moved far enough.

    A token with A > 0 is left out once its probability is dppo_delta above the proximal one, with A < 0 once it is as
    much below: the bound of total variation in place of a ratio's, which is loose for likely tokens and tight for rare
    ones. prime-rl's default loss (delta 0.2, its kl_tau 1e-3), and `dppo_tv` in verl.
    """

    def loss(inputs: LossInputs) -> LossOutput:
        log_ratio = inputs.log_ratio()
        moved = inputs.logprobs.detach().exp() - inputs.proximal_logprobs.exp()
        far = moved * inputs.advantages.sign() > algorithm.dppo_delta
        value = -inputs.advantages * log_ratio.exp()
        return LossOutput(loss=value.masked_fill(far, 0.0) + algorithm.dppo_kl * log_ratio.square(), clipped=far)

    return loss
