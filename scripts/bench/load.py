"""What the replay benchmark puts around the real replay process: `python -m scripts.bench.load ROLE FOLDER JOB`.

Producers are many simulated rollout servers in one process: each has a DEALER and an identity of its own, and keeps to
the protocol (Hello, LeaseRequest, a Group for every Lease, Heartbeats). Their groups are made before the measurement:
random, all different, of lognormal lengths. The learner has the real one's end of the channel: it takes, commits and
publishes; it trains nothing, and checks that no group comes twice and no token is too old.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from configs.loading import load as load_config
from configs.schema import Config
from learner.batches import BatchReader
from replay import messages as m
from replay.channel import Limits, Message, configure, decode, encode, load_keys
from replay.fingerprint import run_fingerprint
from replay.lifeline import die_with_parent
from scripts.bench.cases import Load, Prepared, prepare

RUN_ID = "bench"
FIELDS = (
    "version",  # learner: newest version that was published
    "steps",  # learner: committed
    "tokens",  # learner: answer tokens of committed steps
    "batch_bytes",  # learner: frames of the batches that came
    "joined",  # producers: that are welcome
    "groups",  # producers: accepted
    "group_tokens",  # producers: answer tokens of them
    "group_bytes",  # producers: their frames
    "refused",  # producers: acks other than `accepted`, cancels and refusals
    "stop",  # the command: LEARNER_STOPS, then ALL_STOP
    "hold",  # the command: the learner joins and takes nothing
    "resting_bytes",  # the command: resident memory of replay before any group came
)
LEARNER_STOPS, ALL_STOP = 1, 2
POLL_S = 0.1
POLL_MS = 20
SPARE_SOCKETS = 16
BEAT = m.Heartbeat(activity="simulated", gauges={"tokens_per_s": 1.0})


class Board:
    """Counters shared by the processes of a case: a file in memory, one int64 and one writer a field, no lock.

    The version is what the weight bus would deliver to rollout servers; everything else is for the measurement.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.zeros(len(FIELDS), dtype=np.int64).tofile(path)
        self._values = np.memmap(path, dtype=np.int64, mode="r+", shape=(len(FIELDS),))

    def __getitem__(self, field: str) -> int:
        return int(self._values[FIELDS.index(field)])

    def __setitem__(self, field: str, value: int) -> None:
        self._values[FIELDS.index(field)] = value

    def add(self, field: str, value: int) -> None:
        """For the one process that writes this field."""
        self._values[FIELDS.index(field)] += value

    def read(self, fields: Sequence[str]) -> dict[str, int]:
        """Several fields, one after the other."""
        return {field: self[field] for field in fields}


# ---- producers ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Producer:
    """One simulated rollout server."""

    name: str
    socket: "zmq.Socket[bytes]"
    sequence: int = 0
    incarnation: int = 0
    """0 until replay has a learner; then leases may be asked for."""
    version: int = -1
    joined: bool = False

    def send(self, message: Message) -> int:
        """Send a message; its bytes."""
        self.sequence += 1
        frames = encode(message, RUN_ID, self.sequence)
        self.socket.send_multipart(frames, copy=False)
        return sum(len(frame) for frame in frames)


class Producers:
    """All producers of this process."""

    def __init__(self, config: Config, address: str, board: Board, pool: list[Prepared], count: int) -> None:
        self.config, self.board, self.pool = config, board, pool
        self.sent: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(tokens, bytes) of what was not acked yet, by lease."""
        self.capacity = -(-2 * (config.replay.async_lag + 1) * config.rollout.groups_per_step // count)
        self.next = 0
        self.fingerprint = run_fingerprint(config)
        self.context = zmq.Context()  # one for all: each has threads of its own
        self.context.set(zmq.MAX_SOCKETS, count + SPARE_SOCKETS)
        self.poller = zmq.Poller()
        keys, limits = load_keys(config.network.keys), Limits(config.network.max_message_bytes)
        self.by_socket: dict[Any, Producer] = {}
        for i in range(count):
            dealer = self.context.socket(zmq.DEALER)
            configure(dealer, limits, keys)
            dealer.setsockopt(zmq.IDENTITY, f"rollout-{i}.{os.getpid()}".encode())
            dealer.connect(address)
            self.poller.register(dealer, zmq.POLLIN)
            self.by_socket[dealer] = Producer(f"rollout-{i}", dealer)

    def run(self) -> None:
        """Until the board says stop."""
        next_beat = 0.0
        while self.board["stop"] < ALL_STOP:
            if time.monotonic() >= next_beat:
                for producer in self.by_socket.values():
                    # a connection that was given up during its handshake has lost its Hello
                    producer.send(BEAT if producer.joined else self.hello(producer.name))
                next_beat = time.monotonic() + self.config.network.heartbeat_s
            for ready, _ in self.poller.poll(POLL_MS):
                self.drain(self.by_socket[ready])
            self.follow(self.board["version"])
        self.context.destroy(linger=0)

    def hello(self, name: str) -> m.Hello:
        """The first message of a producer."""
        host = socket.gethostname()
        return m.Hello(role="rollout_server", name=name, pid=os.getpid(), host=host, fingerprint=self.fingerprint)

    def follow(self, version: int) -> None:
        """In the place of the weight bus: every server gets the newest version, and says so."""
        for producer in self.by_socket.values():
            if producer.incarnation and producer.version < version:
                producer.version, incarnation = version, producer.incarnation
                producer.send(m.LeaseRequest(capacity=self.capacity, version=version, incarnation=incarnation))

    def drain(self, producer: Producer) -> None:
        """Everything that has arrived for one producer; each lease is answered with the next prepared group."""
        while True:
            try:
                frames = producer.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            match decode(frames, m.FROM_REPLAY).message:
                case m.Lease() as lease:
                    prepared = self.pool[self.next % len(self.pool)]
                    self.next += 1
                    size = producer.send(prepared.group(lease, producer.version))
                    self.sent[lease.pass_, lease.index, lease.attempt] = (prepared.young.size, size)
                case m.Ack(status="accepted") as ack:
                    tokens, size = self.sent.pop((ack.pass_, ack.index, ack.attempt))
                    self.board.add("groups", 1)
                    self.board.add("group_tokens", tokens)
                    self.board.add("group_bytes", size)
                case m.Welcome() as welcome:
                    self.board.add("joined", int(not producer.joined))
                    producer.joined, producer.incarnation = True, welcome.incarnation
                case m.Ack() | m.Refused() | m.Cancel() as message:  # a fault of the benchmark or of replay
                    self.board.add("refused", 1)
                    print(f"{producer.name}: {message}", file=sys.stderr, flush=True)


# ---- the learner ----------------------------------------------------------------------------------------


class Fault(RuntimeError):
    """Replay did something that no learner could work with; the message says what."""


class Learner:
    """Rank 0 of one."""

    def __init__(self, config: Config, address: str, board: Board, checkpoint_every: int) -> None:
        self.config, self.board, self.checkpoint_every = config, board, checkpoint_every
        self.trained: set[tuple[int, int]] = set()
        self.batches = BatchReader(config, address, rank=0, fingerprint=run_fingerprint(config))

    def run(self) -> None:
        """Join, then step after step until the board says stop; its Goodbye ends the run. Raises Fault."""
        self.batches.connect()
        self.batches.join(version=0, digest="", bus_address=None, cursor=None)
        step = 0
        while not self.board["stop"]:
            if self.board["hold"]:
                time.sleep(POLL_S)
                continue
            step += 1
            self.step(step)
        self.batches.close("the benchmark is over", failed=False)

    def step(self, step: int) -> None:
        """Take, commit, publish."""
        batch = self.batches.take(step, lambda batch: None)
        tokens = self.check(batch, step)
        self.batches.commit(step, f"simulated-{step}")
        if batch.checkpoint or step % self.checkpoint_every == 0:
            self.batches.cursor(step)
            self.batches.checkpointed(step, [step])
        self.batches.published(step, f"simulated-{step}")
        self.board["version"] = step
        self.board.add("tokens", tokens)
        self.board.add("batch_bytes", sum(getattr(batch, name).nbytes for name in batch.ARRAYS))
        self.board["steps"] = step

    def check(self, batch: m.Batch, step: int) -> int:
        """Answer tokens of a batch. Raises Fault when it is not the batch of a step, or has a group a second time."""
        expected = self.config.rollout.groups_per_step
        groups = {(pass_, index) for pass_, index in batch.group_ids}
        tokens = int(batch.lengths.sum())
        if batch.step != step or len(groups) != expected or batch.versions.size != tokens:
            raise Fault(f"batch {batch.step} of {len(groups)} groups came for step {step} of {expected} groups")
        if groups & self.trained:
            raise Fault(f"batch {step} has group {min(groups & self.trained)} a second time")
        self.trained |= groups
        if int(batch.versions.min()) < step - 1 - self.config.replay.async_lag:
            raise Fault(f"batch {step} has a token of version {int(batch.versions.min())}")
        return tokens


def main() -> None:
    """Entry point of either."""
    role, folder, job = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    die_with_parent(job["parent"])
    config, board = load_config(folder / "config.yaml"), Board(folder / "board")
    if role == "producers":
        Producers(config, job["address"], board, prepare(Load(**job["load"])), job["count"]).run()
    else:
        Learner(config, job["address"], board, job["checkpoint_every"]).run()


if __name__ == "__main__":
    main()
