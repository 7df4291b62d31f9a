"""Bounds of the loss and its correction that go together; test_beside_keys.py has those that do not."""

import pytest

from configs import Config, load

POLICY_GRADIENT = "algorithm.loss=policy_gradient"


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.clip_dual=3", "algorithm.veto_low=1e-4", "algorithm.veto_high=100"],
        ["algorithm.correction=icepop", "algorithm.correction_low=0.5", "algorithm.correction_high=5"],
        [POLICY_GRADIENT, "algorithm.correction=token_tis", "algorithm.correction_high=1"],
    ],
)
def test_what_can_work_is_accepted(overrides: list[str]) -> None:
    assert isinstance(load("quickstart", overrides), Config)
