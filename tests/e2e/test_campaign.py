"""Short campaigns of faults against real processes; `python -m scripts.chaos --faults 200` is the long one."""

import pytest

from tests.support.campaigns import run_campaign

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FAULTS = "kill replay,kill learner,kill server,torn journal,flip up,cut,full disk"


def test_nothing_is_lost_doubled_hung_or_unnamed(tmp_path, sort6, zygote):
    where = ("--work", str(tmp_path / "work"), "--data", str(sort6.folder))
    found, _ = run_campaign("--faults", "6", "--seed", "335", "--only", FAULTS, *where, timeout=880, zygote=zygote)
    wrong = ("lost", "trained_twice", "hung", "unnamed", "ended_early", "violations")
    assert {key: found[key] for key in wrong} == dict.fromkeys(wrong, 0)
    assert found["faults"] == 6
    assert found["acked"] >= found["trained"] > 6 * 10, "real groups were acked, and real steps trained"
    assert found["repeated_steps"] > 0, "a learner was killed, and repeated what the journal has"
