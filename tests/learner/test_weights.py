"""The learner's end of the weight bus: when a step waits for the report of its broadcast, and when it goes on."""

from types import SimpleNamespace
from typing import Any

import pytest

from learner.weights import WeightPublisher
from tests.learner.tiny_models import make_config

LATE = SimpleNamespace(late=())


@pytest.mark.parametrize(
    ("lag", "evaluates", "last", "settled", "waits"),
    [
        (1, False, False, False, False),  # a newer version may take its place
        (1, False, False, True, True),  # the report is there
        (0, False, False, False, True),  # nothing newer can come before it is live
        (1, True, False, False, True),  # this version is evaluated
        (1, False, True, False, True),  # the run ends with it
    ],
)
def test_a_step_waits_only_for_a_version_that_none_may_supersede(
    tmp_path: Any, lag: int, evaluates: bool, last: bool, settled: bool, waits: bool
) -> None:
    bus = object.__new__(WeightPublisher)
    bus.config = make_config(tmp_path, replay={"async_lag": lag})
    bus._publisher = SimpleNamespace(settled=settled, wait=lambda: LATE)  # type: ignore[assignment]
    bus._is_out, bus._evaluates = True, evaluates
    assert (bus.wait(last=last) is LATE) is waits
    assert bus.wait(last=True) is None, "nothing is out any more"
