"""Worker processes that compute without a pause are named while cores are free."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from configs.loading import load
from configs.schema import Config
from slipstream.runtime.vitals.busy import Busy
from slipstream.runtime.vitals.processes import Use, by_role

WORKERS = {"rollout_server.tasks.environments.worker": "environment"}


def config(folder: Path, *settings: str) -> Config:
    return load(
        "quickstart", [f"run.dir={folder}", "run.name=a", "reward.workers=1", "environment.workers=1", *settings]
    )


def samples(made: Config, cores: dict[int, float], *, free: float, role: str = "environment", number: int = 8):
    """Gauges and lines of samples, 10 s apart, of processes that use so many cores each."""
    watch, found = Busy(made), []
    for at in range(number):
        use = Use(cpu_by_pid={pid: 5.0 + each * 10 * at for pid, each in cores.items()})
        found.append(watch.judge(10.0 * at, 1e6 + free * 10 * at, {role: use, "engine": Use()}))
    return found


@pytest.mark.parametrize("role", ["environment", "reward"])
def test_a_worker_that_is_always_busy_is_named_once_with_its_key(role, tmp_path):
    found = samples(config(tmp_path), {7: 0.0, 8: 0.97}, free=3.5, role=role)
    assert [bool(lines) for _, lines in found] == [False, False, False, True, False, False, False, False]
    assert found[0] == ({}, []) and found[1][0] == {f"vitals/full_workers/{role}": 1.0}
    (line,) = found[3][1]
    assert f"the {role} process (pid 8) computed without a pause for 30 s" in line
    assert line.endswith(f"while 3.5 cores are free: raise {role}.workers (1)")


@pytest.mark.parametrize(
    ("cores", "free", "full"),
    [({8: 0.97}, 0.5, 1), ({8: 0.85}, 3.5, 0), ({8: 0.97, 9: 0.5}, 3.5, 1)],
    ids=["no core is free", "it pauses", "the other one pauses"],
)
def test_where_another_worker_would_not_help_nothing_is_said(cores, free, full, tmp_path):
    found = samples(config(tmp_path, f"environment.workers={len(cores)}"), cores, free=free)
    assert not any(lines for _, lines in found)
    assert found[-1][0] == {"vitals/full_workers/environment": full}


def test_all_of_several_and_one_that_was_started_anew(tmp_path):
    watch, said = Busy(config(tmp_path, "environment.workers=2")), []
    for at in range(8):
        second = {9: 10.0 * at} if at < 2 else {10: 10.0 * (at - 2)}  # in its first sample it has no rate
        use = Use(cpu_by_pid={8: 10.0 * at, **second})
        said.append(watch.judge(10.0 * at, 100.0 * at, {"environment": use})[1])
    assert [len(lines) for lines in said] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert "all 2 environment processes" in said[5][0]


def test_a_worker_counts_by_its_own_time_and_not_by_what_it_has_started():
    starts = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", starts, "rollout_server.tasks.environments.worker"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as worker:
        child = int(worker.stdout.readline())
        use = by_role(psutil.Process(), "rollout", WORKERS, "engine")["environment"]
        subprocess.run(["kill", "-9", str(child), str(worker.pid)], check=True)
    assert list(use.cpu_by_pid) == [worker.pid] and use.processes == 2
