"""The learner's end of the weight bus: when a step waits for the report of its broadcast, and when it goes on."""

from types import SimpleNamespace
from typing import Any

import pytest

from learner.weights import WeightPublisher, numbers_of
from tests.learner.tiny_models import make_config

LATE = SimpleNamespace(late=())
FAILED = SimpleNamespace(
    version=4, late=("rollout-1",), served=["rollout-0"], failed={"rollout-1": "applying v4 [slow]"}, held={},
    seconds={"total": 2.0}, num_bytes=1, epoch=1,
)  # fmt: skip


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


def test_who_has_not_taken_a_version_is_named(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    bus = object.__new__(WeightPublisher)
    bus.config = make_config(tmp_path)
    bus._publisher = SimpleNamespace(wait=lambda: FAILED)  # type: ignore[assignment]
    bus._is_out, bus._evaluates = True, False
    assert bus.wait(last=True) is FAILED and "rollout-1 did not take version 4 in time" in caplog.text
    assert numbers_of(FAILED)["weight_sync/digests_equal"] is False  # type: ignore[arg-type]
    assert "version 4 did not reach 'rollout-1': applying v4 [slow]" in caplog.text
