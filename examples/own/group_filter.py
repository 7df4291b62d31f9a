"""A filter of groups: keep those with a spread of rewards. `algorithm.dynamic_sampling: group_filter.py:spread`."""

import numpy as np

from replay.filters import FilterInputs


def spread(group: FilterInputs, *, least: float = 0.05) -> bool:
    """True keeps the group; another prompt takes the place of one that is dropped."""
    return bool(np.ptp(group.rewards) >= least)
