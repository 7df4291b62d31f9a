"""An advantage against the group's best answer. `algorithm.advantage: {advantage.py:against_best: {share: 0.8}}`."""

import numpy as np

from learner.advantages import AdvantageInputs, declare


@declare(compares_within_groups=True)
def against_best(inputs: AdvantageInputs, *, share: float = 0.5) -> np.ndarray:
    """[N] one number for each answer of the whole batch."""
    best = {group: inputs.rewards[inputs.groups == group].max() for group in set(inputs.groups.tolist())}
    return inputs.values - share * np.array([best[group] for group in inputs.groups.tolist()])
