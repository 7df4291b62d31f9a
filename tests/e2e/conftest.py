"""Whole runs: real processes, real sockets, real gloo, real FSDP2 ranks."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass
class Sort6:
    """The quick start's input on disk."""

    folder: Path

    @property
    def settings(self):
        return [
            f"model.path={self.folder}/model",
            f"data.train={self.folder}/train.jsonl",
            f"data.eval={self.folder}/eval.jsonl",
        ]


@dataclass
class Run:
    """A launcher process and its run folder."""

    process: subprocess.Popen
    folder: Path
    output: Path

    def wait(self, timeout=150):
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the run did not end within {timeout} s:\n{self.text()[-3000:]}") from None
        return code

    def text(self):
        return self.output.read_text()

    def rows(self):
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line]

    def steps(self):
        return [row for row in self.rows() if "training/lag_histogram" in row]

    def ledger(self):
        return [json.loads(line) for line in (self.folder / "ledger.jsonl").read_text().splitlines()]

    def log(self, name):
        return (self.folder / "logs" / f"{name}.log").read_text()

    def wait_for_step(self, step, timeout=150):
        self.wait_until(
            lambda: any(row["training/global_step"] >= step for row in self.steps()), f"step {step}", timeout
        )

    def wait_until(self, condition, what, timeout=60):
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"the run ended while waiting for {what}:\n{self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"{what} did not come within {timeout} s:\n{self.text()[-3000:]}"
            time.sleep(0.1)

    def pids(self, needle=""):
        """Processes of this run whose command line holds `needle`."""
        return [pid for pid, command in processes() if str(self.folder) in command and needle in command]


def processes():
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state != "Z":
                found.append((int(entry.name), command))
    return found


@pytest.fixture(scope="session")
def sort6(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sort6") / "data"
    subprocess.run(
        [sys.executable, "-m", "learner.examples.sort6", "--out", str(folder), "--seed", "0"],
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    return Sort6(folder)


@pytest.fixture
def launch(tmp_path, sort6):
    """Start `python -m learner.main` with small settings; whatever is left of it is ended afterwards."""
    runs = []

    def start(*settings, name="run", steps=4, split="1:1", arguments=()):
        folder = tmp_path / name
        small = [
            *sort6.settings,
            f"run.dir={tmp_path}",
            f"placement.split={split}",
            f"learner.total_steps={steps}",
            "rollout.groups_per_step=16",
            "rollout.max_running=128",
            "evaluation.num_prompts=64",
            "evaluation.every_steps=0",
            "tracking.live=plain",
            "tracking.plot=false",
        ]
        output = tmp_path / f"{name}-{len(runs)}.out"
        command = [sys.executable, "-m", "learner.main", "--name", name]
        for setting in [*small, *settings]:
            command += ["--set", setting]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        run = Run(process, folder, output)
        runs.append(run)
        return run

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        for pid in run.pids():
            os.kill(pid, 9)
