"""Faults at the points of an update: plan, the judgement of a case; gates and faults of a process."""

import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.chaos import site_start
from scripts.chaos.campaigns.bus import (
    AT_NO_GATE_OF_A_RECEIVER,
    FAULTS,
    JOINING,
    POINTS,
    ROLES,
    SAYS,
    Outcome,
    TrainingRun,
    make_plan,
    totals,
)
from scripts.chaos.polling import wait_until
from scripts.chaos.processes import close_connections, may_cut
from scripts.chaos.watch import Gate


@pytest.fixture
def training(tmp_path, monkeypatch):
    """A run without processes, held at a point while its receiver is hit."""
    run = TrainingRun(tmp_path, "receiver")
    limits = {"network": SimpleNamespace(silent_after_s=0.0), "weight_bus": SimpleNamespace(deadline_s=0.0)}
    run.config = SimpleNamespace(**limits, learner=SimpleNamespace(batch_deadline_s=0.0))
    run.watch.probes |= {
        name: SimpleNamespace(gate=Gate(tmp_path / name), live=0) for name in ("rollout-a", "rollout-b")
    }
    monkeypatch.setattr("scripts.chaos.campaigns.bus.recovery_s", lambda _: 0.05)
    (run.folder / "logs").mkdir(parents=True)
    return run


def test_a_wait_beyond_the_deadline_counts_as_hung(training, monkeypatch):
    monkeypatch.setattr(training, "_approach", lambda gate, point, hold_s: gate.aim(point, hold_s))
    monkeypatch.setattr(training, "_pid", 1 << 30)
    monkeypatch.setattr(training, "wait", lambda condition, what, limit: wait_until(condition, what, 0.05))
    training._goal = 1
    outcome = training.case("kill", "middle bucket")
    assert outcome.hung.startswith("v1 at both rollout servers: not within") and outcome.seconds > 0
    assert "HUNG" in outcome.row() and totals([outcome], 0, 0)["hung"] == 1
    assert not (training.work / "rollout-a" / "aim").exists(), "nothing is held"


LOST = "weight bus: v3 epoch 2: 'rollout-a' (pid 7, rank 1) is gone [closed]; removed"
JUDGED = {
    "named": ("kill", LOST, True, []),
    "not named": ("kill", "all is well", True, ["no line names it"]),
    "another process of its name": ("kill", LOST.replace("pid 7", "pid 8"), True, ["no line names it"]),
    "another one, too": ("kill", f"{LOST}\nreplay: lost 'rollout-b' [closed]", True, ["lost 'rollout-b'"]),
    "stuck": ("stuck", "all is well", True, ["no line names it"]),
    "slow": ("slow", "all is well", True, []),
    "slow, and lost": ("slow", LOST, True, ["; removed"]),
    "other weights": ("kill", LOST, False, []),
}


@pytest.mark.parametrize(("fault", "log", "equal", "wrong"), JUDGED.values(), ids=JUDGED)
def test_a_case_is_in_order_only_when_the_hit_process_is_named_and_no_other(training, fault, log, equal, wrong):
    training._pid = 7
    (training.folder / "logs" / "learner-0.log").write_text(log + "\n")
    row = {"weight_sync/version": 3, "weight_sync/digests_equal": equal}
    (training.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    outcome = Outcome(role="receiver", fault=fault, point="Begin")
    training._judge(outcome)
    assert outcome.digests_equal is equal and len(outcome.wrong) == len(wrong), outcome.wrong
    assert all(words in found for words, found in zip(wrong, outcome.wrong, strict=True))
    assert totals([outcome], 0, 0)["unnamed"] == bool(wrong) and ("WRONG" in outcome.row()) is bool(wrong)


def test_the_plan_has_twenty_points_for_every_fault_and_as_many_as_asked_for():
    assert len(POINTS) == 20 and set(JOINING) < set(POINTS)
    cases = make_plan(ROLES, tuple(FAULTS), 20, 1)
    every = {(role, f, name) for role in ROLES for f in ("kill", "stop", "cut", "slow") for name in POINTS}
    stuck = {("receiver", "stuck", name) for name in set(POINTS) - set(AT_NO_GATE_OF_A_RECEIVER)}
    assert len(cases) == len(set(cases)) and set(cases) == every | stuck
    assert tuple(SAYS) == ROLES and all(set(says) - {"stuck"} == {"kill", "stop", "cut"} for says in SAYS.values())
    few = make_plan(ROLES, ("kill",), 5, 3)
    assert [sum(case[0] == role for case in few) for role in ROLES] == [5, 5, 5]
    assert few == make_plan(ROLES, ("kill",), 5, 3) != make_plan(ROLES, ("kill",), 5, 4)


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


@pytest.mark.parametrize(("module", "expected"), [("replay.main", 3600), ("learner.train", -3600), ("other", 0)])
def test_the_wall_clock_of_a_role_is_shifted(tmp_path, module, expected):
    (tmp_path / "clock").write_bytes(struct.pack("<4d", 3600, -3600, 0, 0))
    shutil.copyfile(site_start.__file__, tmp_path / "sitecustomize.py")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CHAOS_CLOCK": str(tmp_path / "clock")}
    program = "import time, datetime as d; print(time.time() - d.datetime.now().timestamp(), time.time_ns() / 1e9)"
    command = [sys.executable, "-c", program, "-m", module]
    out = subprocess.check_output(command, env=environment, cwd=Path("/"), text=True, timeout=120)
    shift, now = map(float, out.split())
    assert abs(shift - expected) < 5 and abs(now - time.time() - expected) < 5
