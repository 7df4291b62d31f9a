"""Group-relative advantages that weigh a success by how rare it is."""

from typing import Any

import numpy as np

from configs import Config
from configs.errors import SlipstreamError
from learner.advantages.base import EPSILON, AdvantageInputs, Float64, declare


class NegativeReward(SlipstreamError, ValueError, code="SLIP-REWARD-08"):
    """A reward is negative, and the advantage takes none."""


def _has_negative_rewards(config: Config, _: dict[str, Any]) -> str:
    algorithm = config.algorithm
    if algorithm.kl_in != "reward" and not algorithm.overlong_buffer:
        return ""
    key = "kl_in 'reward'" if algorithm.kl_in == "reward" else f"overlong_buffer {algorithm.overlong_buffer}"
    return (
        f"algorithm.{key} makes rewards negative, and it takes rewards >= 0 only; leave that out, or take advantage"
        " 'dr_grpo'"
    )


@declare(compares_within_groups=True, refuses=_has_negative_rewards)
def maxrl(inputs: AdvantageInputs) -> Float64:
    """(reward - group mean) / group mean, for rewards >= 0; 0 where no answer of the group has any reward.

    Maximum likelihood reinforcement learning (MaxRL): for rewards 0 and 1 its gradient is that of the log likelihood
    of success, of which the plain policy gradient is the first order. Raises NegativeReward.
    """
    values = inputs.values
    if (values < 0).any():
        wrong = int(np.flatnonzero(values < 0)[0])
        raise NegativeReward(
            f"reward of trajectory {wrong} is {values[wrong]:g}; algorithm.advantage 'maxrl' divides by the group's"
            " mean and takes rewards >= 0 only"
        )
    mean = inputs.of_groups().mean(values)
    return (values - mean) / (mean + EPSILON)
