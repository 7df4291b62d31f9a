"""Which policies a finished group names: what replay compares with the line of policies."""

import numpy as np

from rollout_server.leases import policies_of


def versions(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def test_a_group_names_the_policies_that_were_live_while_it_ran() -> None:
    served = [(1, 4), (1, 5), (2, 5), (2, 6)]
    assert policies_of(versions(4, 4), served[:1]) == [[1, 4]]
    assert policies_of(versions(4, 6), served) == [[1, 4], [2, 6]]
    assert policies_of(versions(5), served) == [[1, 5], [2, 5]], "either may have sampled it"


def test_tokens_of_a_prefix_are_of_the_incarnation_at_the_lease() -> None:
    assert policies_of(versions(3, 5), [(1, 5), (2, 6)]) == [[1, 3], [1, 5]]
