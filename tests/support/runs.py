"""Whole runs for tests: their input, the launcher, what it wrote, and the processes that belong to it."""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from configs import load
from configs.loading import dump
from scripts.chaos.processes import commands
from scripts.chaos.processes import free_port as free_port
from slipstream.launch.children import Tail
from tests.support.forking import Started, Zygote
from tests.support.waiting import PATIENT_S

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """The environment that programs of a test start with."""
    return {**os.environ, "SLIPSTREAM_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}


@dataclass
class Input:
    """A model and prompts on disk."""

    folder: Path
    reward: str = "exact"

    @property
    def settings(self) -> list[str]:
        paths = {"model.path": "model", "data.train": "train.jsonl", "data.eval": "eval.jsonl"}
        return [*(f"{key}={self.folder}/{name}" for key, name in paths.items()), f"reward.function={self.reward}"]


def trained_input(temporary: pytest.TempPathFactory) -> Input:
    """The quick start's input. It takes half a minute, so one is made for all lanes of tests."""
    shared = temporary.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    command = [sys.executable, "-m", "examples.sort6", "--out", str(shared / "sort6"), "--seed", "0"]
    with (shared / "sort6.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(command, cwd=ROOT, check=True, timeout=400)
    return Input(shared / "sort6")


def untrained_input(folder: Path) -> Input:
    """The same without training, and a reward that differs for every answer."""
    from examples.sort6 import build_model, rows, save_tokenizer, split_prompts

    folder.mkdir(parents=True)
    for name, numbers in zip(("train.jsonl", "eval.jsonl"), split_prompts(0, 4000, 64), strict=True):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows(numbers)))
    build_model(0).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    return Input(folder, f"{ROOT}/tests/support/rewards.py:spread")


@dataclass
class Run:
    """A launcher process and its run folder."""

    process: "subprocess.Popen[bytes] | Started"
    folder: Path
    output: Path

    def wait(self, timeout: float = 400) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the run did not end within {timeout} s:\n{self.text()[-3000:]}") from None

    def text(self) -> str:
        return self.output.read_text()

    def rows(self) -> list[dict[str, Any]]:
        return Tail(self.folder / "metrics.jsonl").new_rows()

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.rows() if "training/lag_histogram" in row]

    def ledger(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Tail(self.folder / "ledger.jsonl").new_lines()]

    def groups(self) -> list[tuple[int, int]]:
        """Every trained group, as often as it was trained."""
        return [tuple(group) for line in self.ledger() for group in line["groups"]]

    def log(self, name: str) -> str:
        path = self.folder / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def replay_address(self) -> str:
        found: list[str] = []
        self.wait_until(lambda: found.extend(re.findall(r"ready at (\S+)\s", self.log("replay"))) or found, "replay")
        return found[0]

    def wait_for_step(self, step: int, timeout: float = 200) -> None:
        self.wait_until(
            lambda: any(row["training/global_step"] >= step for row in self.steps()), f"step {step}", timeout
        )

    def wait_until(self, condition: Callable[[], Any], what: str, timeout: float = 150) -> None:
        deadline = time.monotonic() + timeout
        has_ended = False
        while not condition():
            assert not has_ended, f"the run ended while waiting for {what}:\n{self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"{what} did not come within {timeout} s:\n{self.text()[-3000:]}"
            time.sleep(0.05)
            has_ended = self.process.poll() is not None  # then the condition has its last look

    def pids(self, needle: str = "") -> list[int]:
        """Processes of this run whose command line holds `needle`, the eldest first."""
        return [pid for pid, command in processes() if str(self.folder) in command and needle in command]

    def kill(self, needle: str) -> None:
        """kill -9 of the youngest process whose command line holds `needle`."""
        os.kill(self.pids(needle)[-1], signal.SIGKILL)

    def nothing_left(self) -> bool:
        return left_over(str(self.folder)) == []


@dataclass
class Runs:
    """Starts runs with small settings below a folder; `close` ends what is left. Without a zygote all is for real."""

    folder: Path
    input: Input
    zygote: Zygote | None
    started: list[Run] = field(default_factory=list)

    def __call__(
        self, *settings: str, name: str = "run", steps: int = 4, split: str = "1:1", arguments: Sequence[str] = ()
    ) -> Run:
        """Start the launcher with `key=value` settings over the small ones."""
        small = [*self.small(steps), f"placement.split={split}"]
        words = [word for setting in (*small, *settings) for word in ("--set", setting)]
        return self.start(["learner.main", "--name", name, *words, *arguments], self.folder / name)

    def small(self, steps: int) -> list[str]:
        """Settings of every run."""
        return [
            *self.input.settings,
            f"run.dir={self.folder}",
            f"learner.total_steps={steps}",
            "rollout.groups_per_step=16",
            "rollout.max_running=128",
            "evaluation.num_prompts=64",
            "evaluation.every_steps=0",
            "tracking.live=plain",
            "tracking.plot=false",
        ]

    def start(self, words: Sequence[str], folder: Path, *, cwd: Path = ROOT) -> Run:
        """`python -m` these words; `folder` is the run's."""
        output = self.folder / f"{folder.name}-{len(self.started)}.out"
        command = [sys.executable, "-m", *words]
        process: subprocess.Popen[bytes] | Started
        if self.zygote is None:
            with output.open("wb") as file:
                process = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=subprocess.STDOUT, env=environment())
        else:
            process = self.zygote.start(command, output=output, env=environment(), cwd=cwd)
        run = Run(process, folder, output)
        self.started.append(run)
        return run

    def over_two_nodes(self, *settings: str, steps: int = 4) -> tuple[Run, list[Run]]:
        """Both have this host's address on its network: the first node, with a learner rank, and the other's parts.

        They are a rollout server of the first, and a learner rank. Skips the test where this host has no network.
        """
        addresses = [one for each in psutil.net_if_addrs().values() for one in each if one.family is socket.AF_INET]
        address = next((one.address for one in addresses if not one.address.startswith("127.")), None)
        if address is None:
            pytest.skip("this host has no address but loopback's")
        ports = [f"{key}={free_port()}" for key in ("network.replay_port", "placement.rendezvous_port")]
        nodes = ["placement.rollout=node0:0", "placement.learner=node0:1;node1:0", "network.insecure=true", *ports]
        small = [*self.small(steps), "run.name=run", "placement.device=cpu", *nodes, *settings]
        (self.folder / "run.yaml").write_text(dump(load("quickstart", small)))
        (self.folder / "hosts").write_text(f"node0 {address}\nnode1 {address}\n")
        files = ["--hosts", str(self.folder / "hosts"), "--config", str(self.folder / "run.yaml")]
        first, *others = (
            self.start(["slipstream.launch.node", "--role", role, "--node", node, *files], self.folder / "run")
            for role, node in (("learner", "node0"), ("learner", "node1"), ("rollout", "node0"))
        )
        return first, others

    def resume(self, folder: Path, *arguments: str) -> Run:
        """`--resume` of a run in this folder."""
        return self.start(["learner.main", "--resume", str(folder), *arguments], folder)

    def server(
        self,
        run: Run,
        name: str,
        program: str = "rollout_server.main",
        first: Sequence[str] = (),
        settings: Sequence[str] = (),
    ) -> Run:
        """Start a rollout server by hand; `first` and `settings` surround its arguments."""
        words = ["--config", str(run.folder / "config.yaml"), "--replay", run.replay_address(), "--server-name", name]
        return self.start([program, *first, *words, *settings], run.folder)

    def close(self) -> None:
        for run in self.started:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait(10)
            for pid in run.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def processes() -> list[tuple[int, str]]:
    """(pid, command line) of every process that is no zombie."""
    return list(commands(psutil.process_iter()).items())


def left_over(needle: str) -> list[tuple[int, str]]:
    """Other processes whose command line still holds `needle` when a busy machine has had its time to end them."""
    deadline = time.monotonic() + PATIENT_S
    while True:
        left = [found for found in processes() if needle in found[1] and found[0] != os.getpid()]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


@contextlib.contextmanager
def terminal(
    output: Path, *command: str, environment: Mapping[str, str], patience_s: float = 0
) -> Iterator["subprocess.Popen[bytes]"]:
    """A command in its own session; ended by SIGTERM, `patience_s`, SIGKILL."""
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )
    try:
        yield process
    finally:
        if patience_s:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def patient_reward(folder: Path, go_on: Path, *, pause_s: float) -> str:
    """A reward that is slow until the file `go_on` exists, so that the run lasts."""
    file = folder / "patient.py"
    file.write_text(
        "import os, time, zlib\n\n"
        "def reward(sample):\n"
        f"    if not os.path.exists({str(go_on)!r}):\n"
        f"        time.sleep({pause_s})\n"
        '    return zlib.crc32(sample["completion"].encode()) / 2**32\n'
    )
    return f"{file}:reward"
