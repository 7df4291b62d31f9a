"""PPO clip: against the behaviour policy, the clip is the off-policy correction itself."""

import torch

from configs.algorithm import Algorithm
from learner.losses.base import Loss, LossInputs, LossOutput


def ppo_clip(algorithm: Algorithm) -> Loss:
    """Loss max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); for A < 0 at most -A clip_dual, if that is set.

    Schulman et al. 2017, equation 7; separate bounds after DAPO (Yu et al. 2025, "clip-higher"); the dual clip after
    Ye et al. 2020: without it a negative advantage times a large ratio has no bound. With `proximal: behaviour` r is
    taken against the policy that sampled the token, whatever its lag (bypass mode in verl's words); with another one,
    and a correction for its distance to the behaviour policy, this is decoupled PPO (Hilton et al. 2022).
    """
    low, high = algorithm.clip

    def loss(inputs: LossInputs) -> LossOutput:
        ratio, advantages = inputs.log_ratio().exp(), inputs.advantages
        free = -advantages * ratio
        bounded = -advantages * ratio.clamp(1 - low, 1 + high)
        value, clipped = torch.maximum(free, bounded), bounded > free
        if algorithm.clip_dual:
            most = -advantages * algorithm.clip_dual
            held = (advantages < 0) & (value > most)
            value, clipped = torch.where(held, most, value), clipped | held
        return LossOutput(loss=value, clipped=clipped)

    return loss
