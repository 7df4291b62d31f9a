"""GRPO advantages: the formula, exact zeros, and refusal of what cannot be scored."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import grpo


def advantages(rewards: list[float], groups: list[int], *, std: bool = True) -> list[float]:
    result = grpo(np.array(rewards, np.float32), np.array(groups, np.int32), normalize_by_std=std)
    assert result.dtype == np.float32
    return result.tolist()


def test_reward_minus_mean_over_unbiased_std():
    found = advantages([1, 0, 0, 0, 3, 5], [0, 0, 0, 0, 1, 1])
    assert found == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3, -1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)])


def test_without_std_only_the_mean_is_taken_off():
    assert advantages([1, 0, 0, 0], [7, 7, 7, 7], std=False) == [0.75, -0.25, -0.25, -0.25]


@settings(max_examples=100, deadline=None)
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(1, 200), st.booleans())
def test_equal_rewards_are_exactly_zero(reward, size, std):
    assert advantages([reward] * size, [0] * size, std=std) == [0.0] * size


def test_group_of_one_has_no_advantage():
    assert (advantages([5.0], [3]), advantages([], [])) == ([0.0], [])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(0, 4)), min_size=1, max_size=40))
def test_agrees_with_the_statistics_module(rows):
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    found = advantages(rewards, groups)
    for i, (reward, group) in enumerate(rows):
        siblings = [r for r, g in rows if g == group]
        spread = statistics.stdev(siblings) if len(siblings) > 1 else 0.0
        expected = 0.0 if len(set(siblings)) == 1 else (reward - statistics.fmean(siblings)) / (spread + 1e-4)
        assert found[i] == pytest.approx(expected, rel=1e-5, abs=1e-6)
