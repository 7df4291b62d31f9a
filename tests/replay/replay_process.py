"""The real replay process, and peers of it that do what rollout servers and learners promise to do."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from configs import Config
from replay import messages as m
from replay.channel import Dealer
from replay.fingerprint import run_fingerprint
from replay.journal.format import path_of, segments
from tests.replay.simulation.samples import make_group

ROOT = Path(__file__).parents[2]
RUN_ID = "journalled-run"
PATIENT_S = 60.0
GROUPS_PER_STEP = 4


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_run(folder: Path, **replay: Any) -> Path:
    """A run's configuration, its dataset and a model folder without weights, which replay does not need."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 100}))
    (model / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}))
    rows = [json.dumps({"prompt": f"{i}=", "answer": str(i)}) for i in range(1000)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    tree = {
        "run": {"dir": str(folder), "name": "run"},
        "model": {"path": str(model)},
        "data": {"train": str(folder / "train.jsonl"), "shuffle": False},
        "rollout": {"group_size": 2, "groups_per_step": GROUPS_PER_STEP, "max_new_tokens": 1024},
        "replay": {"async_lag": 1, "lease_s": 60.0, "max_attempts": 100, **replay},
        "network": {"heartbeat_s": 0.2},
        "placement": {"device": "cpu", "split": "1:1"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


class Replay:
    """`python -m replay.main`, started again on the same port under the same run id."""

    def __init__(self, folder: Path, **replay: Any) -> None:
        self.folder, self.config_path = folder, write_run(folder, **replay)
        self.config = Config.model_validate(yaml.safe_load(self.config_path.read_text()))
        self.port, self.journal = free_port(), folder / "run" / "journal"
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.fingerprint = run_fingerprint(self.config)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *arguments: str) -> list[str]:
        command = [sys.executable, "-m", "replay.main", "--config", str(self.config_path), "--run-id", RUN_ID]
        return [*command, "--port", str(self.port), *arguments]

    def start(self, *arguments: str) -> None:
        """Start it, and wait until it serves."""
        with (self.folder / "stderr").open("ab") as errors:
            self.process = subprocess.Popen(
                self.command(*arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, env=environment()
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline().decode()
        assert line == f"replay ready at {self.address}\n", (self.folder / "stderr").read_text()

    def refused(self, *arguments: str) -> str:
        """What it says when it does not start."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=PATIENT_S, check=False,
        )  # fmt: skip
        assert done.returncode not in (0, None) and done.stdout == "" and "Traceback" not in done.stderr, done
        return done.stderr.splitlines()[-1]

    def kill(self) -> None:
        """kill -9."""
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def log(self) -> str:
        return (self.folder / "run" / "logs" / "replay.log").read_text()

    def last_file(self) -> Path:
        return path_of(self.journal, segments(self.journal)[-1])


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


class Peer:
    """A DEALER that says Hello again when it is told to."""

    def __init__(self, replay: Replay, identity: str) -> None:
        self.replay, self.identity = replay, identity
        self.dealer = Dealer(replay.address, identity, m.FROM_REPLAY)
        self.beaten_at = 0.0
        self.heard = 0

    def come_back(self) -> None:
        raise NotImplementedError

    def take_in(self, message: m.Message) -> None:
        raise NotImplementedError

    def beat(self) -> None:
        self.dealer.send(m.Heartbeat())

    def pump(self, timeout_s: float = 0.02) -> None:
        """Take in what has come, and beat now and then."""
        while (envelope := self.dealer.poll(timeout_s)) is not None:
            timeout_s = 0.0
            self.heard += 1
            if isinstance(envelope.message, m.Refused):
                assert envelope.message.reason.startswith("say Hello first"), envelope.message
                self.come_back()
            else:
                self.take_in(envelope.message)
        if time.monotonic() - self.beaten_at > 0.1:
            self.beaten_at = time.monotonic()
            self.beat()

    def until(self, condition: Callable[[], object], what: str, *others: "Peer") -> None:
        deadline = time.monotonic() + PATIENT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.replay.log()[-3000:]}"
            for peer in (self, *others):
                peer.pump()

    def close(self) -> None:
        self.dealer.close()


Key = tuple[int, int, int]


class RolloutServer(Peer):
    """Holds leases, renews them, and sends a group until it is acked."""

    def __init__(self, replay: Replay, identity: str = "rollout-0") -> None:
        super().__init__(replay, identity)
        self.leases: dict[Key, m.Lease] = {}
        self.unacked: dict[Key, m.Group] = {}
        self.acks: list[tuple[Key, str]] = []
        self.come_back()

    def come_back(self) -> None:
        fingerprint = self.replay.fingerprint
        hello = m.Hello(role="rollout_server", name=self.identity, pid=1, host="h", fingerprint=fingerprint)
        for message in (hello, m.LeaseRequest(capacity=64, version=0, incarnation=1), *self.unacked.values()):
            self.dealer.send(message)

    def beat(self) -> None:
        super().beat()
        now = time.monotonic_ns() % 1_000_000_007  # progress of a kind
        self.dealer.send(m.Renew(leases=[[*key, now] for key in self.leases]))

    def take_in(self, message: m.Message) -> None:
        if isinstance(message, m.Lease):
            self.leases[message.pass_, message.index, message.attempt] = message
        elif isinstance(message, m.Cancel):
            self.leases.pop((message.pass_, message.index, message.attempt), None)
        elif isinstance(message, m.Ack):
            key = (message.pass_, message.index, message.attempt)
            self.unacked.pop(key, None)
            self.acks.append((key, message.status))

    @property
    def accepted(self) -> set[Key]:
        return {key for key, status in self.acks if status == "accepted"}

    def answer(self, key: Key, tokens: int = 40) -> None:
        """Send the group of a lease that is held."""
        lease = self.leases.pop(key)
        self.unacked[key] = answer_to(lease, tokens)
        self.dealer.send(self.unacked[key])


def answer_to(lease: m.Lease, tokens: int) -> m.Group:
    rng = np.random.default_rng([lease.index, lease.attempt])
    total = 2 * tokens
    return make_group(
        [tokens] * 2,
        pass_=lease.pass_,
        index=lease.index,
        attempt=lease.attempt,
        token_ids=rng.integers(0, 100, total, dtype=np.int32),
        logprobs=-rng.random(total, dtype=np.float32),
        versions=np.full(total, lease.min_version, dtype=np.int32),
    )


class Learner(Peer):
    """Rank 0: repeats what it last said when replay was restarted."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay, "learner-0")
        self.incarnation = 0
        self.said: list[m.Message] = []
        self.batches: dict[int, list[m.Batch]] = {}
        self.proceeds: set[int] = set()
        self.asked_at = 0.0
        self.dealer.send(self.hello())

    def hello(self) -> m.Hello:
        return m.Hello(
            role="learner", name="learner-0", pid=1, host="h", incarnation=self.incarnation,
            digest="digest-0", fingerprint=self.replay.fingerprint,
        )  # fmt: skip

    def come_back(self) -> None:
        self.dealer.send(self.hello())
        for message in self.said:
            self.dealer.send(message)

    def take_in(self, message: m.Message) -> None:
        if isinstance(message, m.Welcome):
            assert message.incarnation == (self.incarnation or 1)
            self.incarnation = message.incarnation
        elif isinstance(message, m.Batch):
            self.batches.setdefault(message.step, []).append(message)
        elif isinstance(message, m.Proceed):
            self.proceeds.add(message.step)

    def ask(self, step: int) -> None:
        """Take, again and again until it has come; then say so."""
        if time.monotonic() - self.asked_at > 0.3:
            self.asked_at = time.monotonic()
            for message in self.said:
                self.dealer.send(message)
            self.dealer.send(m.Take(step=step, rank=0))
            if step in self.batches:
                self.dealer.send(m.Take(step=step, rank=0, have=True))

    def commit(self, step: int) -> None:
        digest = f"digest-{step}"
        self.said = [m.Committed(step=step, digest=digest), m.Published(version=step, digest=digest)]
        for message in self.said:
            self.dealer.send(message)


def contents(batch: m.Batch) -> dict[str, Any]:
    """All of a batch but its numbers about the whole run."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "stats"}
    return {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in values.items()}
