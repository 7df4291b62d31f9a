"""Faults at the points of an update: a few against real processes, the plan, gates and faults of a process."""

import json
import re
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import Any

import pytest

from scripts.chaos.__main__ import main
from scripts.chaos.campaigns.bus import QUICK, make_plan
from scripts.chaos.campaigns.bus_points import FAULTS, JOINING, NAMED, POINTS, Bench, Outcome, totals
from scripts.chaos.campaigns.bus_receivers import CLASSES
from scripts.chaos.campaigns.bus_run import CONCERNED, ROLES, SAYS
from scripts.chaos.polling import wait_until
from scripts.chaos.processes import close_connections, may_cut, slowed, state
from scripts.chaos.watch import CLASS, Gate

ALL = ("receiver", *ROLES)


def test_a_few_faults_of_a_receiver(capsys):
    assert main(["bus", "--quick"]) == 0
    rows = capsys.readouterr().out.splitlines()
    found = json.loads(rows[-1])
    assert found["cases"] + found["skipped"] == len(QUICK) == 4
    assert (found["hung"], found["unnamed"], found["digests_equal"]) == (0, 0, True)
    assert 0 < found["longest_s"] <= found["deadline_s"]
    named = [row for row in rows[1:-1] if re.search(r"'rollout-2' \(pid \d+, .*\[(closed|silent)\]", row)]
    assert len(named) == found["cases"] - 1, "all but the slow one, which must change nothing"
    assert any("slow" in row and "changes nothing" in row for row in rows)


def test_a_wait_beyond_the_deadline_counts_as_hung(tmp_path, monkeypatch):
    ended = []

    @contextmanager
    def fault(pid):
        try:
            yield
        finally:
            ended.append(pid)

    monkeypatch.setitem(FAULTS, "stop", ("", fault))
    bench: Any = Bench()  # whose other processes never go on
    bench.role, bench.deadline_s, bench.pid, gate = "receiver", 15.0, 7, Gate(tmp_path)
    bench.gate, bench.duration_s = lambda _: gate, lambda _: 0.0
    bench.approach = lambda point, hold_s, strike: (gate.aim(point.moment, hold_s), strike())
    bench.outlast = lambda *_: wait_until(lambda: False, "v2 at rollout-0", 0.05)
    outcome = bench.case("stop", NAMED["middle bucket"])
    assert outcome.hung.startswith("v2 at rollout-0: not within") and outcome.seconds > 0
    assert "HUNG" in outcome.row() and totals([outcome], 0, 0)["hung"] == 1
    assert ended == [7] and not (tmp_path / "aim").exists(), "the fault is over, and nothing is held"


# ---- the plan -------------------------------------------------------------------------------------------


def test_the_plan_has_twenty_points_for_every_fault_and_as_many_as_asked_for():
    assert len(POINTS) == len(NAMED) == 20 and set(JOINING) < set(NAMED)
    cases = make_plan(ALL, tuple(FAULTS), 20, 1)
    assert {(f, point) for role, f, point in cases if role == "receiver" and f != "stuck"} == {
        (f, name) for f in ("kill", "stop", "cut", "slow") for name in NAMED
    }
    for role in ROLES:
        mine = [case for case in cases if case[0] == role]
        assert {point for _, _, point in mine} == {point.name for point in CONCERNED}
        assert {f for _, f, _ in mine} == {"kill", "stop", "cut", "slow"}
    few = make_plan(ALL, ("kill",), 5, 3)
    assert [sum(case[0] == role for case in few) for role in ALL] == [5, 5, 5]
    assert few == make_plan(ALL, ("kill",), 5, 3) != make_plan(ALL, ("kill",), 5, 4)


def test_every_fault_is_named_or_must_change_nothing():
    assert all(CLASS.search(f"[{name}]") for name in CLASSES)
    assert set(SAYS) == {(role, f) for role in ROLES for f in ("kill", "stop", "cut")}
    for patterns in SAYS.values():
        assert all(re.compile(pattern) and re.search(r"\\\[\(?\w+", pattern) for pattern in patterns)


def test_names_that_are_not_there_are_refused(capsys):
    for wrong in (["--roles", "nobody"], ["--faults", "flood"], ["--only", "nowhere"]):
        with pytest.raises(SystemExit) as refused:
            main(["bus", *wrong])
        assert refused.value.code == 2 and f"{wrong[1]!r} is none of" in capsys.readouterr().err


def test_rows_and_totals():
    good = Outcome(role="receiver", fault="kill", point="Begin", seconds=2.5, culprit="it died", deadline_s=15.0)
    good.digests_equal = True
    bad = Outcome(role="replay", fault="cut", point="Begin", seconds=4.0, wrong=["no line names it"], deadline_s=100.0)
    found = totals([good, bad], 3, 0)
    assert (found["cases"], found["unnamed"], found["digests_equal"], found["skipped"]) == (2, 1, False, 3)
    assert (found["longest_s"], found["deadline_s"]) == (4.0, 100.0)
    assert found["roles"]["receiver"] == {"cases": 1, "longest_s": 2.5, "deadline_s": 15.0}
    assert "equal" in good.row() and "DIFFERENT" in bad.row() and "WRONG: no line names it" in bad.row()


# ---- gates and faults -----------------------------------------------------------------------------------


def test_a_gate_holds_at_the_moment_that_is_aimed_at_and_no_longer_than_told(tmp_path):
    harness, gate = Gate(tmp_path), Gate(tmp_path)
    gate.reach("Commit")
    assert not harness.arrived
    harness.aim("Commit", 0.2)
    gate.reach("Staged")
    assert not harness.arrived
    started = time.monotonic()
    gate.reach("Commit")
    assert harness.arrived and 0.2 <= time.monotonic() - started < 2.0
    harness.release()
    started = time.monotonic()
    gate.reach("Commit")
    assert time.monotonic() - started < 0.1


def test_a_slowed_process_is_stopped_in_turns_and_runs_afterwards():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        with slowed(child.pid):
            for wanted in "TRTR":
                wait_until(lambda: state(child.pid) == wanted, f"state {wanted}", 5.0)  # noqa: B023
        assert state(child.pid) != "T"
        child.kill()


@pytest.mark.skipif(not may_cut(), reason="the kernel does not let a process reach the sockets of its children")
def test_a_cut_closes_connections_at_both_ends_and_leaves_listeners_alone():
    program = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "while True: c = s.accept()[0]; print(len(c.recv(1)), flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), 5.0) as mine:
                wait_until(lambda: close_connections(child.pid), "an accepted connection", 5.0)
                assert mine.recv(1) == b"" and child.stdout.readline() == "0\n"
        child.kill()
