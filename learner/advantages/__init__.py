"""Advantages: how much better an answer was than expected.

One a file, chosen once by algorithm.advantage."""

import numpy as np
from numpy.typing import NDArray

from configs.algorithm import Algorithm
from learner.advantages.base import Advantage, AdvantageFactory, AdvantageInputs
from learner.advantages.grpo import dr_grpo, grpo
from learner.advantages.maxrl import maxrl
from learner.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from learner.advantages.rloo import rloo

ADVANTAGES: dict[str, AdvantageFactory] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "maxrl": maxrl,
    "reinforce++": reinforce_plus_plus,
    "reinforce++_baseline": reinforce_plus_plus_baseline,
}

__all__ = ["ADVANTAGES", "Advantage", "AdvantageInputs", "advantages_of", "build_advantage"]


def build_advantage(algorithm: Algorithm) -> Advantage:
    """The advantage of this configuration.

    That of `gae` is the reward itself: learner/beside/advantages.py compares it with a critic's values, token by token.
    """
    if algorithm.advantage == "gae":
        return lambda inputs: inputs.values
    return ADVANTAGES[algorithm.advantage](algorithm)


def advantages_of(advantage: Advantage, inputs: AdvantageInputs) -> NDArray[np.float32]:
    """[N] float32; a batch of nothing has none."""
    return advantage(inputs).astype(np.float32) if inputs.rewards.size else np.zeros(0, np.float32)
