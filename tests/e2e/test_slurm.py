"""The file for sbatch under a real Slurm of three machines: requeued, queued twice, near its limit, an array.

By default: tests/slipstream/test_launch_files.py and test_doctor_slurm.py, with stand-ins for Slurm's commands.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs import load
from replay import keys as make_keys
from tests.support.runs import ROOT, Input, Run, environment, left_over, patient_reward
from tests.support.slurm import Cluster, slurm_cluster
from tests.support.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]
PATIENT_S = 240.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(folder) as made:
        yield made
    assert left_over(str(folder)) == []


class Job:
    """A file for sbatch in a folder of its own, and the runs that its jobs begin."""

    def __init__(self, cluster: Cluster, folder: Path, untrained: Input) -> None:
        self.cluster, self.folder, self.input = cluster, folder, untrained
        self.go_on = folder / "go_on"
        self.reward = patient_reward(folder, self.go_on, pause_s=0.4)
        make_keys.make(folder / "keys", [], force=False)

    def write(self, *settings: str, steps: int = 8) -> Path:
        """One learner node and two rollout nodes; samples are slow until `go_on` exists."""
        small = [
            *self.input.settings,
            f"reward.function={self.reward}",
            f"run.dir={self.folder}/runs",
            "run.name=tiny",
            f"network.keys={self.folder}/keys",
            f"learner.total_steps={steps}",
            "learner.warmup_steps=0",
            "rollout.groups_per_step=8",
            "rollout.max_running=32",
            "placement.device=cpu",
            "placement.split=null",
            "placement.learner=node0:0",
            "placement.rollout=node1:0; node2:0",
            "checkpoint.every_steps=2",
            "evaluation.every_steps=0",
            "tracking.plot=false",
            "weight_bus.collective_timeout_s=20",
            "weight_bus.deadline_s=60",
            *settings,
        ]
        file = self.folder / "run.sbatch"
        words = [word for setting in small for word in ("--set", setting)]
        command = [sys.executable, "-m", "slipstream.launch", "learner", "--slurm", "--out", str(file), *words]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=60)
        return file

    def run(self, name: str) -> Run:
        """The run that a job began; its output is the job's."""
        process = subprocess.Popen(["true"])
        return Run(process, self.folder / "runs" / f"tiny-{name}", self.folder / "runs" / "tiny" / "launch")

    def said(self, number: str) -> str:
        """What the job's file for its output has so far."""
        log = self.folder / "runs" / "tiny" / "launch" / f"slurm-{number}.log"
        return log.read_text() if log.exists() else ""

    def starts(self, number: str) -> int:
        """How often Slurm has started it."""
        return len(re.findall(rf"^slipstream: job {number}, start ", self.said(number), re.MULTILINE))

    def wait_for_step(self, number: str, step: int) -> Run:
        run = self.run(number)
        until(
            lambda: self.cluster.has_ended(number) or any(row["training/global_step"] >= step for row in run.steps()),
            f"step {step} of job {number}: {self.said(number)[-3000:]}",
            PATIENT_S,
        )
        assert not self.cluster.has_ended(number), self.said(number)[-3000:]
        return run

    def wait_for_end(self, number: str) -> Run:
        until(lambda: self.cluster.has_ended(number), f"the end of job {number}", PATIENT_S)
        assert self.cluster.job(number)["JobState"] == "COMPLETED", self.said(number)[-3000:]
        return self.run(number)


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path, untrained: Input) -> Job:
    return Job(cluster, tmp_path, untrained)


def steps(run: Run) -> list[int]:
    return [row["training/global_step"] for row in run.steps()]


def test_a_requeued_job_resumes_and_a_playback_reproduces_every_digest(cluster: Cluster, job: Job) -> None:
    number = cluster.submit(str(job.write()))
    run = job.wait_for_step(number, 3)
    until((run.folder / "checkpoints" / "step_2" / "COMPLETE").exists, "the checkpoint of step 2")
    before = {row["training/global_step"]: row["time"] for row in run.steps()}
    cluster.run("scontrol", "requeue", number)
    job.go_on.touch()
    until(lambda: cluster.job(number).get("Restarts") == "1", "a second start", 120)
    job.wait_for_end(number)
    after = {row["training/global_step"]: row["time"] for row in run.steps()}
    assert list(after) == [*range(1, 9)]
    assert [after[step] for step in (1, 2)] == [before[step] for step in (1, 2)], "not trained a second time"
    said = job.said(number)
    assert f"start 2: run {run.folder}" in said and f"{run.folder} was begun by an earlier start of this job" in said
    played = subprocess.run(
        [sys.executable, "-m", "learner.main", "--replay", str(run.folder)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = json.loads(played.stdout.splitlines()[-1])
    assert (found["steps"], found["equal"], found["first_different"]) == (8, 8, None), (found, played.stderr[-2000:])


def test_two_queued_jobs_train_what_each_was_given(cluster: Cluster, job: Job) -> None:
    """Of one name, written to one file, the second before the first has started."""
    job.go_on.touch()
    held = {lr: cluster.submit("--hold", str(job.write(f"learner.lr={lr}", steps=2))) for lr in ("0.001", "0.002")}
    for number in held.values():
        cluster.run("scontrol", "release", number)
    for lr, number in held.items():
        run = job.wait_for_end(number)
        assert load(run.folder / "config.yaml").learner.lr == float(lr) and steps(run) == [1, 2]
        assert {row["actor/lr"] for row in run.steps()} == {float(lr)}


def test_an_array_trains_a_seed_an_index(cluster: Cluster, job: Job) -> None:
    job.go_on.touch()
    number = cluster.submit("--array=0-1", str(job.write("run.seed=7", steps=2)))
    until(lambda: cluster.run("squeue", "--noheader", "--job", number, check=False) == "", "the array", PATIENT_S)
    runs = [job.run(f"{number}_{index}") for index in (0, 1)]
    assert [load(run.folder / "config.yaml").run.seed for run in runs] == [7, 8]
    assert [steps(run) for run in runs] == [[1, 2], [1, 2]], job.said(number)
    assert runs[0].groups() != runs[1].groups()


def test_the_notice_before_the_limit_makes_a_checkpoint_and_the_job_goes_on(cluster: Cluster, job: Job) -> None:
    """Slurm counts in minutes: the notice of 120 s before a limit of five comes 2 to 3 minutes after the start."""
    file = job.write("checkpoint.every_steps=1000", steps=60)
    assert "#SBATCH --signal=B:USR2@120" in file.read_text()
    number = cluster.submit("--time=5", str(file))
    run = job.wait_for_step(number, 1)
    until(lambda: "SIGUSR2 received" in job.said(number), "the notice", 2 * PATIENT_S)
    job.go_on.touch()
    until(lambda: cluster.has_ended(number) or job.starts(number) == 2, "a second start", PATIENT_S)
    kept = list(run.folder.glob("checkpoints/step_*/COMPLETE"))
    said = job.said(number)
    assert kept, said
    job.wait_for_end(number)
    assert steps(run) == [*range(1, 61)]
    assert "SIGUSR2 received: the time limit is near" in said and "a checkpoint is written" in said, said
    assert "resumes it from its journal and newest checkpoint" in job.said(number), kept


def test_a_job_that_has_lost_a_learner_machine_goes_on_with_others(cluster: Cluster, job: Job) -> None:
    """Slurm gives it the machine again only once that is back, so three are enough here."""
    placed = ("placement.learner=node0:0; node1:0", "placement.rollout=node2:0", "placement.give_up_after_s=60")
    number = cluster.submit(str(job.write(*placed)))
    run = job.wait_for_step(number, 3)
    cluster.kill_node("n2")
    until(lambda: cluster.job(number).get("Restarts") == "1", f"queued again: {job.said(number)}", PATIENT_S)
    job.go_on.touch()
    cluster.start_node("n2")
    job.wait_for_end(number)
    said = job.said(number)
    assert steps(run) == [*range(1, 9)] and "placement.give_up_after_s" in said, said
    assert f"job {number} is queued again, and resumes {run.folder}" in said, said


def test_a_job_that_has_lost_its_first_machine_is_queued_again(cluster: Cluster, job: Job) -> None:
    """Its script is gone with that machine, and --no-kill lets Slurm go on with the job all the same."""
    number = cluster.submit(str(job.write()))
    run = job.wait_for_step(number, 3)
    cluster.kill_node("n1")
    until(lambda: cluster.job(number).get("Restarts") == "1", "queued again", PATIENT_S)
    job.go_on.touch()
    cluster.start_node("n1")
    job.wait_for_end(number)
    assert steps(run) == [*range(1, 9)] and job.starts(number) == 2


def test_a_lost_rollout_machine_does_not_end_the_job(cluster: Cluster, job: Job) -> None:
    number = cluster.submit(str(job.write()))
    run = job.wait_for_step(number, 2)
    cluster.kill_node("n3")
    until(lambda: cluster.state("n3").startswith("down"), "Slurm's loss of n3", 60)
    assert cluster.job(number)["JobState"] == "RUNNING"
    job.go_on.touch()
    job.wait_for_end(number)
    cluster.start_node("n3")
    assert steps(run) == [*range(1, 9)]
    assert re.search(r"node2 \(10\.0\.0\.3\) failed: .*Node failure on n3", job.said(number)), job.said(number)
