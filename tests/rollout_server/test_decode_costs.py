"""What a decode step costs, as the torch engine measures it while it decodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.engines.torch.costs import HALVE_AT, DecodeCosts


@given(st.lists(st.integers(1, 512), min_size=2, max_size=50).filter(lambda sizes: len(set(sizes)) > 1))
def test_both_parts_of_a_step_are_found(sizes):
    costs = DecodeCosts()
    costs.prefilled(70, 0.0035)
    for answers in sizes:
        costs.decoded(answers, 0.0016 + answers * 2e-5)
    expected = {"decode_step_s": 0.0016, "decode_answer_s": 2e-5, "prefill_token_s": 5e-5}
    assert costs.measured() == pytest.approx(expected, rel=1e-3)


def test_nothing_is_said_before_steps_had_two_sizes():
    costs = DecodeCosts()
    costs.prefilled(7, 0.001)
    for _ in range(3):
        costs.decoded(8, 0.002)
    assert costs.measured() == {}


def test_no_part_takes_less_than_no_time():
    costs = DecodeCosts()
    costs.prefilled(7, 0.001)
    for answers, seconds in ((8, 0.004), (16, 0.002), (24, 0.001)):
        costs.decoded(answers, seconds)
    found = costs.measured()
    assert found["decode_answer_s"] == 0 and found["decode_step_s"] == pytest.approx(0.007 / 3)


def test_older_steps_count_less():
    costs = DecodeCosts()
    costs.prefilled(7, 0.001)
    for step in range(4 * HALVE_AT):
        costs.decoded(8 + step % 2, 0.001 if step < 2 * HALVE_AT else 0.002)
    assert costs.measured()["decode_step_s"] + 8 * costs.measured()["decode_answer_s"] > 0.0017
