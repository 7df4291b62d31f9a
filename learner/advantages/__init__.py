"""Advantages: how much better an answer was than expected.

One a file, chosen once by algorithm.advantage."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.algorithm import Algorithm
from learner.advantages.base import Advantage, AdvantageFacts, AdvantageInputs, Float64, declare
from learner.advantages.grpo import dr_grpo, grpo
from learner.advantages.maxrl import maxrl
from learner.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from learner.advantages.rloo import rloo
from slipstream.runtime.variants import Kind


@declare(compares_within_groups=False, needs_critic=True)
def gae(inputs: AdvantageInputs) -> Float64:
    """The reward itself, which learner/beside/advantages.py compares with a critic's values, token by token."""
    return inputs.values


ADVANTAGES: Kind[AdvantageFacts] = Kind(
    "algorithm.advantage",
    "inputs",
    {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "maxrl": maxrl,
        "reinforce++": reinforce_plus_plus,
        "reinforce++_baseline": reinforce_plus_plus_baseline,
        "gae": gae,
    },
    undeclared=AdvantageFacts(),
)


def build_advantage(algorithm: Algorithm) -> Advantage:
    """The advantage of this configuration. Raises BadValue."""
    return ADVANTAGES.build(algorithm.advantage).guarded(_problem_with)


def facts_of(algorithm: Algorithm) -> AdvantageFacts:
    """What the advantage of this configuration declares. Raises BadValue."""
    return ADVANTAGES.build(algorithm.advantage).facts


def need_tokens(algorithm: Algorithm) -> bool:
    """Advantages follow from forwards over the tokens, not from rewards alone."""
    return algorithm.kl_in == "reward" or facts_of(algorithm).needs_critic


def drop_zero_advantages(algorithm: Algorithm) -> bool:
    """Trajectories of zero advantage are left out: nothing but their rewards would teach anything."""
    return algorithm.drop_zero_advantage and not need_tokens(algorithm) and algorithm.distillation is None


def leave_out_flat_groups(algorithm: Algorithm) -> bool:
    """Groups whose rewards are all equal cost the learner nothing."""
    return drop_zero_advantages(algorithm) and facts_of(algorithm).leaves_out_flat_groups


def advantages_of(advantage: Advantage, inputs: AdvantageInputs) -> NDArray[np.float32]:
    """[N] float32; a batch of nothing has none. Raises ValueError: it does not take these rewards."""
    return np.asarray(advantage(inputs) if inputs.rewards.size else [], np.float32)


def _problem_with(given: Any, inputs: AdvantageInputs) -> str:
    """Why these are no advantages of the inputs; empty where they are."""
    found = np.asarray(given, np.float32)
    if found.shape == inputs.rewards.shape and np.isfinite(found).all():
        return ""
    return (
        f"gave values of shape {list(found.shape)}, or some that are not finite, for {inputs.rewards.size} answers;"
        " return one finite number for each"
    )
