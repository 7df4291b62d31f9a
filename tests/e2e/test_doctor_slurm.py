"""`slipstream doctor --slurm`: all machines of an allocation by steps of srun, with commands in place of Slurm's."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from configs import ConfigError, load
from slipstream.launch import doctor
from slipstream.launch.host_file import Host
from slipstream.launch.reach import srun
from slipstream.launch.reach.srun import Allocation

pytestmark = [pytest.mark.e2e]
TWO = ("placement.split=null", "placement.learner='node0:0'", "placement.rollout='node1:0'", "network.insecure=true")
SRUN = """#!/usr/bin/env bash
# a step is a process of this machine; every machine has this one's address
for word in "$@"; do case "$word" in --nodelist=*) machine="${word#*=}" ;; esac; done
echo "${*//$'\n'/ }" >>"$STEPS"
while [[ "$1" == --* ]]; do shift; done
[[ "$machine" == "$BROKEN" ]] && { echo "srun: error: $machine: node is down" >&2; exit 1; }
[[ "$1" == bash ]] && { echo "$ADDRESS"; exit; }
exec "$@"
"""
SCONTROL = '#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && printf "$HOSTNAMES"\n'


def own_address() -> str:
    """Of this machine on a network; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


@pytest.fixture
def slurm_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An allocation of two machines; the file that its steps are noted in."""
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "m[1-2]", "SLURM_CPUS_ON_NODE": "2", "BROKEN": ""}
    variables |= {"HOSTNAMES": "m1\\nm2\\n", "ADDRESS": own_address(), "STEPS": str(tmp_path / "steps")}
    variables |= {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "steps"


@pytest.fixture
def examine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    """Run doctor in this process; its exit code and lines."""

    def run(*arguments: str, settings: tuple[str, ...] = TWO) -> tuple[int, list[str]]:
        words = ["--config", "quickstart"]
        for setting in ("placement.device=cpu", f"run.dir={tmp_path}/runs", *settings):
            words += ["--set", setting]
        return doctor.main([*words, "--slurm", *arguments]), capsys.readouterr().out.splitlines()

    return run


def test_a_probe_runs_on_every_node_of_the_allocation(slurm_commands: Path, examine: Any) -> None:
    began = time.monotonic()
    _, lines = examine("--json", "--backends", "none")
    found = json.loads(lines[0])
    assert time.monotonic() - began < 60
    assert set(found["facts"]) == {"learner of node0", "rollout of node1"}
    assert {"clock", "versions", "link"} <= {each["code"] for each in found["findings"]}, lines
    steps = slurm_commands.read_text().splitlines()
    probes = [step for step in steps if "slipstream.check.probe" in step]
    assert sorted(step.split("--nodelist=")[1].split()[0] for step in probes) == ["m1", "m2"]  # both at once
    for step in steps:
        assert (
            all(word in step for word in (*srun.STEP, "--unbuffered", "--cpus-per-task=2")) and "--gpus" not in step
        ), step


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set, so this shell is not in an allocation of Slurm; get one with"),
        ({"SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST is not set"),
        ({"HOSTNAMES": "m1\\n"}, "2 nodes (node0, node1), and the allocation has 1 (m1); ask Slurm for --nodes=2"),
        ({"HOSTNAMES": ""}, "SLURM_JOB_NODELIST 'm[1-2]'"),
        ({"BROKEN": "m2"}, "m2 was not asked for its address: srun ended with exit code 1: srun: error: m2: node is"),
        ({"ADDRESS": ""}, "shows no address; set SLIPSTREAM_INTERFACE"),
        ({"PATH": "/nowhere"}, "scontrol cannot be started (No such file or directory); run doctor on a machine of"),
    ],
)
def test_what_is_no_allocation_for_the_run_is_named(
    slurm_commands: Path, examine: Any, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, lines = examine()
    assert code == 1
    assert any(line.startswith("stop") and said in line for line in lines), lines


def test_a_step_that_is_held_back_is_named(slurm_commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(srun, "STEP_S", 0.3)
    (slurm_commands.parent / "bin" / "srun").write_text("#!/bin/sh\nexec sleep 30\n")
    config, began = load("quickstart", list(TWO)), time.monotonic()
    with pytest.raises(ConfigError, match=r"m1 was not asked for its address: srun was not done within 0\.3 s"):
        srun.of_this_process(config).hosts(config)
    assert time.monotonic() - began < 15


def test_steps_ask_for_the_gpus_of_their_node() -> None:
    settings = ["placement.learner='node0:0-1'", "placement.rollout='node1:0-7'", "placement.device=cuda"]
    settings += ["network.insecure=true", "placement.split=null", "weight_bus.backend=gloo"]
    variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "m[1-2]", "PATH": "/nowhere"}
    asked: list[list[str]] = []

    def said(command: list[str], _: str) -> list[str]:
        asked.append(command)
        return ["m1", "m2"]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(srun, "_said", said)
        made = srun.allocation(load("quickstart", settings), variables)
    assert made == Allocation(("m1", "m2"), 8, "") and asked == [["scontrol", "show", "hostnames", "m[1-2]"]]
    step = made.command(Host("node1", "10.0.0.2", "m2"), ["true"])
    assert "--gpus-per-node=8" in step and "--nodelist=m2" in step and step[-1] == "true"
    assert not any(word.startswith("--cpus-per-task") for word in step)


def test_the_address_is_that_of_the_interface_that_is_named() -> None:
    """Bash and awk as they stand in the file for sbatch and in a step of doctor."""
    command = ["bash", "-c", srun.ADDRESS]
    variables = {**os.environ, "SLIPSTREAM_INTERFACE": "lo"}
    if subprocess.run(["ip", "-V"], capture_output=True, check=False).returncode != 0:
        pytest.skip("ip is not installed")
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "127.0.0.1", (done, sys.platform)
