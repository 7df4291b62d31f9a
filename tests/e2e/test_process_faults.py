"""kill -9 of every role in the middle of a run, Ctrl-C, and what is left afterwards (DESIGN: processes)."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def replay_address(run):
    return re.search(r"ready at (\S+)", run.log("replay"))[1]


def start_server(run, name, *prefix):
    """A rollout server started by hand for a running run."""
    log = (run.folder / "logs" / f"{name}.by-hand").open("wb")
    return subprocess.Popen(
        [
            sys.executable,
            *(prefix or ("-m", "rollout_server.main")),
            *("--config", str(run.folder / "config.yaml"), "--replay", replay_address(run), "--server-name", name),
        ],
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
    )


def nothing_left(run, within=5.0):
    deadline = time.monotonic() + within
    while run.pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    return run.pids() == []


def trained_once(run):
    groups = [tuple(g) for line in run.ledger() for g in line["groups"]]
    return len(groups) == len(set(groups))


def test_a_killed_rollout_server_is_restarted_and_nothing_is_trained_twice(launch):
    run = launch("rollout.restart_backoff_s=0.1", steps=30)
    run.wait_for_step(3)
    os.kill(run.pids("rollout_server.main")[0], signal.SIGKILL)
    assert run.wait() == 0, run.text()[-3000:]
    assert re.search(r"rollout-0 \(pid \d+\) died: killed by SIGKILL.*; restart 1 of 3", run.text())
    assert len(run.steps()) == 30 and trained_once(run)
    assert "it goes to other servers" in run.log("replay") or "which go to other servers [closed]" in run.log("replay")


def test_without_restarts_the_run_goes_on_with_another_server(launch):
    run = launch("rollout.restarts=0", split="2:1", steps=30)
    run.wait_until(lambda: len(run.steps()) > 2 and run.steps()[-1].get("rollout/servers") == 2, "two servers", 90)
    os.kill(run.pids("--server-name rollout-0")[0], signal.SIGKILL)
    assert run.wait() == 0, run.text()[-3000:]
    assert "rollout-0" in run.text() and "no restart left" in run.text()
    assert len(run.steps()) == 30 and trained_once(run)


def test_without_any_server_the_run_waits_by_name_and_goes_on_with_a_new_one(launch):
    run = launch("rollout.restarts=0", "rollout.wait_for_servers_s=60", steps=20)
    run.wait_for_step(3)
    os.kill(run.pids("rollout_server.main")[0], signal.SIGKILL)
    run.wait_until(lambda: "waits 60 s for one (rollout.wait_for_servers_s)" in run.text(), "the named wait")
    server = start_server(run, "by-hand")
    try:
        assert run.wait() == 0, run.text()[-3000:]
    finally:
        server.kill()
        server.wait()
    assert len(run.steps()) == 20 and trained_once(run)
    assert run.steps()[-1]["rollout/groups/by-hand"] > 0


def test_a_run_that_nobody_rescues_ends_with_the_reason(launch):
    run = launch("rollout.restarts=0", "rollout.wait_for_servers_s=2", steps=2000)
    run.wait_for_step(2)
    os.kill(run.pids("rollout_server.main")[0], signal.SIGKILL)
    assert run.wait(60) == 1
    assert "no rollout server for 2 s (rollout.wait_for_servers_s) [silent]" in run.text().splitlines()[-1]
    assert nothing_left(run)


@pytest.mark.parametrize(("role", "needle"), [("replay", "replay.main"), ("learner", "learner.train")])
def test_without_restarts_the_death_of_replay_or_a_learner_rank_ends_the_run_with_one_line(launch, role, needle):
    run = launch("replay.restarts=0", "learner.restarts=0", steps=2000, split="1:2")
    run.wait_for_step(2)
    os.kill(run.pids(needle)[-1], signal.SIGKILL)
    assert run.wait(60) == 1
    last = run.text().splitlines()[-1]
    assert "run stopped" in last and role in last, last
    assert nothing_left(run)


def test_kill_9_of_the_launcher_leaves_no_process_behind(launch):
    run = launch(steps=2000, split="1:2")
    run.wait_for_step(2)
    assert len(run.pids()) >= 5, "launcher, replay, torchrun, two ranks and a rollout server"
    run.process.kill()
    run.process.wait()
    assert nothing_left(run)


def test_ctrl_c_ends_everything_and_says_how_to_go_on(launch):
    run = launch(steps=2000)
    run.wait_for_step(2)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(20) == 130
    assert "SIGINT received; --resume" in run.text().splitlines()[-1]
    assert nothing_left(run, within=1.0)


FAULTS = {
    "wire": ("3", r"'wire'.*(embed_tokens|proj|norm).*\[corrupt\]"),
    "live": ("5", r"'live'.*(q_proj|k_proj|v_proj).*\[corrupt\]"),
    "die": ("7", r"'die'.*\[(closed|silent)\]"),
}
"""What a server does to itself, in the how manieth version that it is sent, and how the learner says it."""


def planted(run, fault):
    """The version in which it was planted, if it was."""
    found = re.search(rf"planting {fault} in v(\d+)", (run.folder / "logs" / f"{fault}.by-hand").read_text())
    return found and int(found[1])


def test_planted_faults_on_the_bus_are_named_and_the_next_version_is_served(launch):
    """A flipped byte on the wire, a flipped byte in the live fused qkv tensor, a death in the broadcast."""
    deadline = 10
    run = launch("weight_bus.collective_timeout_s=2", f"weight_bus.deadline_s={deadline}", steps=2000)
    run.wait_until(lambda: (run.folder / "logs" / "replay.log").exists() and "ready at" in run.log("replay"), "replay")
    script = os.path.join(ROOT, "tests", "e2e", "faulty_rollout_server.py")
    servers = [start_server(run, fault, script, fault, when) for fault, (when, _) in FAULTS.items()]
    try:
        run.wait_until(lambda: all(planted(run, fault) for fault in FAULTS), "all faults", 200)
        newest = max(planted(run, fault) for fault in FAULTS)
        run.wait_until(
            lambda: any(r["weight_sync/version"] > newest and r["weight_sync/members"] == 3 for r in run.steps()),
            "a version that all who live hold",
        )
        run.process.send_signal(signal.SIGINT)
        assert run.wait(60) == 130, run.text()[-3000:]
    finally:
        for server in servers:
            server.kill()
            server.wait()
    for fault, (_, words) in FAULTS.items():
        lines = [line for line in run.log("learner-0").splitlines() if re.search(words, line)]
        assert lines and f"v{planted(run, fault)}" in lines[0], (fault, run.log("learner-0")[-3000:])
    steps = run.steps()
    assert max(row["timing_s/publish_wait"] for row in steps) <= deadline + 1, "no step waits longer than the deadline"
    assert steps[-1]["weight_sync/digests_equal"] is True
    assert trained_once(run)
