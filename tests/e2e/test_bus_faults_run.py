"""Faults of a receiver and of replay at points of an update; `python -m scripts.chaos bus` has the others."""

import pytest

from tests.support.campaigns import run_campaign

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def faults(tmp_path, sort6, *words):
    found, said = run_campaign("bus", *words, "--work", str(tmp_path / "work"), "--data", str(sort6.folder))
    assert (found["cases"], found["hung"], found["unnamed"], found["violations"]) == (2, 0, 0, 0)
    assert found["digests_equal"] is True and 0 < found["longest_s"] <= found["deadline_s"]
    return said


def test_a_few_faults_of_a_receiver(tmp_path, sort6):
    said = faults(tmp_path, sort6, "--quick")
    assert "'rollout-a' (pid " in said and "changes nothing" in said


@pytest.mark.slow  # test_campaign and test_in_place kill replay in a run
def test_a_run_goes_on_from_faults_of_replay_in_the_middle_of_an_update(tmp_path, sort6):
    said = faults(tmp_path, sort6, "--roles", "replay", "--faults", "kill,slow", "--only", "gathering")
    assert "died: killed by SIGKILL [closed]" in said
