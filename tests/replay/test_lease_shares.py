"""A server that announces a version a moment before the others does not get all the work that needs it."""

import pytest

from replay.desks.leases import WAIT_FOR_OTHERS_S, Shares


def test_the_first_that_has_a_version_gets_its_part_until_the_others_have_had_their_time() -> None:
    shares = Shares()
    assert shares.most([3, 3, 3, 3], needed=4, work=64, now=10.0) == 64, "nobody can take it anyway"
    assert shares.most([4, 3, 3, 3], needed=4, work=64, now=11.0) == 16
    assert shares.most([4, 4, 3, 3], needed=4, work=65, now=11.0 + WAIT_FOR_OTHERS_S) == 17, "rounded up"
    assert shares.most([4, 4, 3, 3], needed=4, work=64, now=11.1 + WAIT_FOR_OTHERS_S) == 64, "one of them is slow"
    assert shares.most([5, 4, 4, 3], needed=5, work=64, now=20.0) == 16, "the next version, the next wait"
    assert shares.most([5, 5, 5, 5], needed=5, work=64, now=20.1) == 64, "all have it"


@pytest.mark.parametrize("versions", [[], [7]])
def test_one_server_or_none_waits_for_nobody(versions: list[int]) -> None:
    assert Shares().most(versions, needed=7, work=64, now=0.0) == 64
