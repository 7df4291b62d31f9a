"""`launch run` starts both sides, and starts a node again whose process is killed, the learner's from its checkpoint.

By default: tests/slipstream/test_launch_ssh.py (which node is started again, over commands in place of nodes).
"""

import os
import signal
import socket
import sys

import pytest

from tests.support.runs import Run, environment, free_port, left_over, patient_reward, processes, terminal

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 24
SETTINGS = f"""
placement.split=1:1 placement.device=cpu rollout.groups_per_step=8 rollout.max_running=32 evaluation.every_steps=0
tracking.live=plain tracking.plot=false checkpoint.every_steps=2 learner.total_steps={STEPS} run.name=run
"""


def kill(tmp_path, role):
    (pid,) = [
        pid
        for pid, command in processes()
        if "slipstream.launch.node" in command and f"--role {role}" in command and str(tmp_path) in environ(pid)
    ]
    os.kill(pid, signal.SIGKILL)


def environ(pid):
    with open(f"/proc/{pid}/environ") as file:
        return file.read()


def test_nodes_whose_process_is_killed_are_started_again_and_the_run_goes_on(tmp_path, untrained):
    go_on, taken = tmp_path / "go-on", tmp_path / "run" / "config.yaml"
    taken.parent.mkdir()
    taken.touch()
    enter, hosts = tmp_path / "enter", tmp_path / "hosts"
    enter.write_text('#!/usr/bin/env bash\nexec bash -c "$2"\n')
    enter.chmod(0o755)
    hosts.write_text("node0 127.0.0.1 ssh=here\n")
    own = [*untrained.settings, f"reward.function={patient_reward(tmp_path, go_on, pause_s=0.03)}"]
    own += [f"run.dir={tmp_path}", f"network.replay_port={free_port()}", *SETTINGS.split()]
    words = [sys.executable, "-m", "slipstream.launch", "run", "--hosts", str(hosts)]
    words += [word for setting in own for word in ("--set", setting)]
    variables = {**environment(), "SLIPSTREAM_SSH": str(enter)}
    with terminal(tmp_path / "run.out", *words, environment=variables, patience_s=40) as process:
        run = Run(process, tmp_path / "run-2", tmp_path / "run.out")
        run.wait_until((run.folder / "checkpoints" / "step_2" / "COMPLETE").exists, "a checkpoint", 120)
        kill(tmp_path, "learner")
        run.wait_until(lambda: "resumes it from its journal" in run.text(), "the next start of the learner", 60)
        run.wait_for_step(run.steps()[-1]["training/global_step"] + 2, 120)
        join = [sys.executable, "-m", "slipstream.launch", "rollout", "--replay", run.replay_address()]
        with terminal(tmp_path / "join.out", *join, environment=environment(), patience_s=40) as joiner:
            name = f"rollout/groups/rollout-{socket.gethostname()}-{joiner.pid}-0"
            run.wait_until(lambda: run.steps()[-1].get(name), "a trained group of a host that joined", 120)
        kill(tmp_path, "rollout")
        run.wait_until(lambda: "rollout side (127.0.0.1) failed: killed by SIGKILL" in run.text(), "its end", 60)
        go_on.touch()
        assert run.wait(120) == 0, run.text()[-3000:]
    assert "slipstream: node0 (127.0.0.1) failed: killed by SIGKILL [closed]; restart 1 of 3" in run.text()
    assert sorted(path.parent.name for path in tmp_path.glob("*/config.yaml")) == ["run", "run-2"]
    assert [row["training/global_step"] for row in run.steps()] == list(range(1, STEPS + 1))
    assert len(run.groups()) == len(set(run.groups())) == STEPS * 8, "nothing is trained twice"
    assert left_over(str(tmp_path)) == []
