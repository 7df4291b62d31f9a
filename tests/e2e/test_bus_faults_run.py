"""Faults of a receiver at points of an update; `python -m scripts.chaos bus` has the others.

By default: tests/chaos/test_bus.py, and test_process_faults.py (faults that a server plants in itself).
"""

import pytest

from tests.support.campaigns import run_campaign

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_few_faults_of_a_receiver(tmp_path, sort6, zygote):
    where = ("--work", str(tmp_path / "work"), "--data", str(sort6.folder))
    found, said = run_campaign("bus", "--quick", *where, zygote=zygote)
    assert (found["cases"], found["hung"], found["unnamed"], found["violations"]) == (2, 0, 0, 0)
    assert found["digests_equal"] is True and 0 < found["longest_s"] <= found["deadline_s"]
    assert "'rollout-a' (pid " in said and "changes nothing" in said
