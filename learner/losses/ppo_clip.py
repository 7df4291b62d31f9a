"""PPO clip with the ratio taken against the behaviour policy: the clip is the off-policy correction."""

import torch

from configs.algorithm import Algorithm
from learner.losses.base import LossInputs, LossOutput, finish, log_ratio


def ppo_clip(inputs: LossInputs, algorithm: Algorithm) -> LossOutput:
    """Loss max(−A r, −A clip(r, 1 − clip_low, 1 + clip_high)) with r = π/μ, per token.

    Schulman et al. 2017, equation 7; separate bounds after DAPO (Yu et al. 2025, "clip-higher"). μ is the policy that
    sampled the token, whatever its lag (bypass mode in verl's words), so no second forward is needed.
    """
    ratio = log_ratio(inputs.logprobs, inputs.behaviour_logprobs).exp()
    value, clipped = clipped_surrogate(ratio, inputs.advantages, algorithm)
    return finish(inputs, value, clipped)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, algorithm: Algorithm
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pessimistic surrogate [B, T-1], and where the clip took over (bool)."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    return torch.maximum(free, bounded), bounded > free
