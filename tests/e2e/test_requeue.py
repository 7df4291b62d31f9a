"""A job that its scheduler starts again resumes its run: a requeued Slurm job, a Kubernetes job with new pods.

By default: tests/slipstream/test_launch_ssh.py (what a start resumes) and test_launch_files.py (the files).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from slipstream.launch.files.kubernetes import READY
from tests.support.runs import ROOT, Run, environment, free_port, patient_reward, processes

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ENVIRONMENT = {**environment(), "PYTHONPATH": str(ROOT)}
SRUN = """#!/bin/bash
# stands in for srun on one machine: a step is a process, and the machine's address is asked for with `bash -c`
while [[ "$1" == --* ]]; do shift; done
[[ "$1" == bash ]] && { echo 127.0.0.1; exit; }
exec "$@"
"""


class Slurm:
    """Runs the generated file as sbatch would, under one job id."""

    ready_files = ()

    def __init__(self, folder, settings):
        write("--slurm", "--out", str(folder / "run.sbatch"), *settings)
        self.file, self.starts = folder / "run.sbatch", 0
        commands = folder / "bin"
        commands.mkdir()
        (commands / "scontrol").write_text("#!/bin/sh\necho m1\n")
        (commands / "srun").write_text(SRUN)
        for command in commands.iterdir():
            command.chmod(0o755)
        self.path = f"{commands}:{os.environ['PATH']}"

    def start(self):
        job = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "m1", "SLURM_CPUS_ON_NODE": "2", "PATH": self.path}
        restarted = {"SLURM_RESTART_COUNT": str(self.starts)} if self.starts else {}
        self.starts += 1
        return [["bash", str(self.file)]], ENVIRONMENT | job | restarted


class Kubernetes:
    """Runs the containers' commands of the generated JobSet, as the kubelet would."""

    def __init__(self, folder, settings):
        replay = f"tcp://127.0.0.1:{settings[-1].rpartition('=')[2]}"
        write("--kubernetes", "--out", str(folder / "manifests"), "--replay", replay, *settings)
        files, jobset = yaml.safe_load_all((folder / "manifests" / "jobset.yaml").read_text())
        for name, text in files["data"].items():
            (folder / name).write_text(text)
        jobs = jobset["spec"]["replicatedJobs"]
        self.containers = [job["template"]["spec"]["template"]["spec"]["containers"][0] for job in jobs]
        self.folder = folder
        self.ready_files = [folder / f"ready-{each['name']}" for each in self.containers]

    def start(self):
        own = {"$(JOB_COMPLETION_INDEX)": "0", "$(POD_IP)": "127.0.0.1", "python": sys.executable}
        files = ("/etc/slipstream", str(self.folder))
        commands = []
        for each, ready in zip(self.containers, self.ready_files, strict=True):  # of pods, which share no /tmp
            words = own | {READY: str(ready)}
            commands.append([words.get(word, word).replace(*files) for word in each["command"]])
        return commands, ENVIRONMENT


def write(*words):
    subprocess.run(["bash", "scripts/start_learner.sh", *words], cwd=ROOT, env=ENVIRONMENT, check=True, timeout=150)


@contextlib.contextmanager
def job(scheduler, output):
    """One start of the job; leaving it is what a machine does that is taken away: SIGKILL for everything."""
    commands, environment = scheduler.start()
    with output.open("wb") as file:
        how = {"cwd": ROOT, "env": environment, "stdout": file, "stderr": file, "start_new_session": True}
        started = [subprocess.Popen(command, **how) for command in commands]
    try:
        yield started[0]
    finally:
        deadline = time.monotonic() + 30
        while left := [pid for pid, command in processes() if str(output.parent) in command and pid != os.getpid()]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        for process in started:
            process.wait(30)


@pytest.mark.parametrize("scheduler_of", [Slurm, Kubernetes])
def test_a_job_that_is_started_again_resumes_its_run(tmp_path, untrained, scheduler_of):
    folder = tmp_path / "job"
    folder.mkdir()
    go_on = tmp_path / "go-on"  # slow until a node has looked whether all take part
    config = [*untrained.settings, f"reward.function={patient_reward(tmp_path, go_on, pause_s=0.1)}"]
    config += [f"run.dir={folder}/runs", "run.name=run", "rollout.groups_per_step=8"]
    config += ["placement.split=1:1", "placement.device=cpu", "learner.total_steps=6", "checkpoint.every_steps=2"]
    config += ["evaluation.every_steps=0", "tracking.plot=false", "network.insecure=true"]
    config += [f"network.replay_port={free_port()}"]
    scheduler = scheduler_of(folder, [word for setting in config for word in ("--set", setting)])

    def only_run():
        runs = [path.parent for path in (folder / "runs").glob("*/config.yaml")]
        assert len(runs) <= 1, f"one job has one run: {runs}"
        return runs[0] if runs else None

    with job(scheduler, folder / "first.out") as process:
        run = Run(process, folder / "runs", folder / "first.out")
        run.wait_until(lambda: only_run() is not None, "the run folder")
        run.folder = only_run()
        run.wait_for_step(3)
        run.wait_until(lambda: all(file.exists() for file in scheduler.ready_files), "all pods ready")
        run.wait_until((run.folder / "checkpoints" / "step_2" / "COMPLETE").exists, "the checkpoint of step 2")
    before = {row["training/global_step"]: row["time"] for row in run.steps()}
    go_on.touch()

    with job(scheduler, folder / "second.out") as process:
        again = Run(process, run.folder, folder / "second.out")
        assert again.wait() == 0, again.text()[-3000:]
    assert only_run() == run.folder
    after = {row["training/global_step"]: row["time"] for row in again.steps()}
    assert list(after) == [1, 2, 3, 4, 5, 6]
    assert [after[step] for step in (1, 2)] == [before[step] for step in (1, 2)], "not trained a second time"
    assert f"slipstream: {run.folder} has no journal and no complete checkpoint: begins the run" in run.text()
    assert f"slipstream: {run.folder} was begun by an earlier start of this job: resumes it" in again.text()
