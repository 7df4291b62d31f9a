"""The learning rate of every step."""

import math
from typing import Any

import pytest

from configs.learner import LearnerSettings
from learner.optimizer import lr_at


def rates(**changes: Any) -> list[float]:
    config = LearnerSettings(**{"lr": 1.0, "total_steps": 10, "warmup_steps": 4, **changes})
    return [lr_at(step, config) for step in range(1, 13)]


def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step():
    assert rates() == [0.25, 0.5, 0.75] + [1.0] * 9
    assert rates(warmup_steps=0) == rates(warmup_steps=1) == [1.0] * 12


def test_schedules_end_at_a_tenth_and_stay_there():
    linear, cosine = rates(schedule="linear"), rates(schedule="cosine")
    assert linear[3:] == pytest.approx([1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.1, 0.1])
    assert cosine[3] == 1.0 and cosine[6] == pytest.approx(0.55)
    assert cosine[4] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 6)))
    assert cosine[9:] == pytest.approx([0.1, 0.1, 0.1])


def test_no_step_has_rate_zero():
    for schedule in ("constant", "cosine", "linear"):
        assert min(rates(schedule=schedule)) > 0
    assert min(rates(warmup_steps=10, schedule="cosine")) > 0
