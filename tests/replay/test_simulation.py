"""Simulated runs with every kind of fault keep every promise; a broken guard is found, and named with its seed."""

import json

import pytest

from replay.state.buffer import GroupBuffer
from tests.replay.simulation import __main__ as simulate


@pytest.mark.parametrize(
    "seeds", [range(120), pytest.param(range(120, 400), marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=len
)
def test_runs_with_every_fault_keep_every_promise(seeds):
    counts, problems = simulate.simulate_many(seeds)
    assert not problems, problems[0]
    assert counts["steps"] >= len(seeds) * 10, "every run makes ten more steps after its faults"
    happened = "crashes learner_restarts servers_killed disk_full diverged repeated dropped rolled_back lag_lowered"
    assert all(counts[name] for name in happened.split()), counts


def test_the_last_line_is_a_summary(capsys):
    assert simulate.main(["--seeds", "4", "--first", "1000", "--processes", "1"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["seeds"], summary["violations"]) == (4, 0) and summary["steps"] >= 40


def test_a_broken_promise_is_named_with_its_seed(monkeypatch):
    monkeypatch.setattr(GroupBuffer, "in_flight", property(lambda self: len(self.slots)))
    _, problems = simulate.simulate_many(range(10))
    assert problems and problems[0].startswith("seed ") and "groups in flight, the bound is" in problems[0]
