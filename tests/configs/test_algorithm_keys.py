"""Keys of the loss and its correction: what is refused, and with which words."""

import pytest

from configs import Config, ConfigError, load

POLICY_GRADIENT = "algorithm.loss=policy_gradient"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.clip_dual=1"], ["clip_dual: 1", "every token", "such as 3"]),
        (["algorithm.clip_dual=3", "algorithm.loss=gspo"], ["clip_dual: 3", "'gspo'", "loss=ppo_clip"]),
        (["algorithm.veto_high=0.5"], ["veto_high: 0.5", "such as 100"]),
        (["algorithm.correction=icepop", "algorithm.correction_high=0.5"], ["correction_high: 0.5", "ratio of 1"]),
        (["algorithm.correction=icepop", "algorithm.correction_low=1.5"], ["correction_low: 1.5", "ratio of 1"]),
        (["algorithm.correction_high=3"], ["correction_high: 3", "'none'"]),
        (
            [POLICY_GRADIENT, "algorithm.correction=token_tis", "algorithm.correction_low=0.5"],
            ["correction_low: 0.5", "'token_tis'", "icepop"],
        ),
    ],
)
def test_what_would_leave_out_most_tokens_or_nothing_is_refused(overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", overrides)
    assert [word for word in words if word not in str(refused.value)] == [], str(refused.value)


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
