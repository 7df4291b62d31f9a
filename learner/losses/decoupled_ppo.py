"""Decoupled PPO: the clip is taken around a proximal policy, and its distance to μ becomes a capped weight."""

from configs.algorithm import Algorithm
from learner.losses.base import LossInputs, LossOutput, finish, log_ratio
from learner.losses.ppo_clip import clipped_surrogate


def decoupled_ppo(inputs: LossInputs, algorithm: Algorithm) -> LossOutput:
    """Loss w · max(−A r, −A clip(r, ...)) with r = π/π_prox and w = min(π_prox/μ, max_prox_weight), per token.

    Hilton et al. 2022, in the form of AReaL (Fu et al. 2025). π_prox is log-linear between μ and π:
    log π_prox = log μ + α (log π − log μ), α = d/(d+1) for a token of lag d, without gradient. With one update a
    step, the usual choice "weights at the start of the step" equals π and would leave truncated importance
    weights without any clip; this one keeps 1/(d+1) of the log ratio inside the clip, and is PPO clip at lag 0.
    """
    alpha = inputs.lags / (inputs.lags + 1)
    distance = alpha * log_ratio(inputs.logprobs.detach(), inputs.behaviour_logprobs)
    weight = distance.exp().clamp(max=algorithm.max_prox_weight)
    ratio = log_ratio(inputs.logprobs, inputs.behaviour_logprobs + distance).exp()
    value, clipped = clipped_surrogate(ratio, inputs.advantages, algorithm)
    return finish(inputs, weight * value, clipped)
