"""Two faults of replay at points of an update, in a real run; `python -m scripts.chaos bus` has the others."""

import pytest

from tests.support.campaigns import run_campaign

# default witnesses: test_campaign and test_in_place kill replay in a run, tests/chaos/test_bus.py hits a receiver
pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_run_goes_on_from_faults_of_replay_in_the_middle_of_an_update(tmp_path, sort6):
    cases = ("--roles", "replay", "--faults", "kill,slow", "--only", "gathering")
    found, said = run_campaign("bus", *cases, "--work", str(tmp_path / "work"), "--data", str(sort6.folder))
    assert (found["cases"], found["hung"], found["unnamed"], found["violations"]) == (2, 0, 0, 0)
    assert found["digests_equal"] is True and found["longest_s"] <= found["deadline_s"]
    assert "died: killed by SIGKILL [closed]" in said
