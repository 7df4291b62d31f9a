"""What the replay benchmark puts around the real replay process: `python -m scripts.bench.load ROLE FOLDER JOB`.

Producers are many simulated rollout servers in one process: each has a DEALER and an identity of its own, and keeps to
the protocol (Hello, LeaseRequest, a Group for every Lease, Heartbeats). Their groups are made before the measurement:
random, all different, of lognormal lengths. The learner takes, commits and publishes; it trains nothing, and checks
that no group comes twice and no token is too old.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import zmq

from configs.loading import load as load_config
from configs.schema import Config
from replay import messages as m
from replay.channel import Dealer, Limits, Message, configure, decode, encode, load_keys
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
Kind = TypeVar("Kind", bound=Message)


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


class Producers:
    """All producers of this process."""

    def __init__(self, config: Config, address: str, board: Board, pool: list[Prepared], count: int) -> None:
        self.config, self.board, self.pool = config, board, pool
        self.sent: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(tokens, bytes) of what was not acked yet, by lease."""
        in_flight = (config.replay.async_lag + 1) * config.rollout.groups_per_step
        self.capacity = -(-2 * in_flight // count)
        self.next = 0
        self.fingerprint = run_fingerprint(config)
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, count + SPARE_SOCKETS)
        self.poller = zmq.Poller()
        keys, limits = load_keys(config.network.keys), Limits(config.network.max_message_bytes)
        self.by_socket: dict[Any, Producer] = {}
        for i in range(count):
            dealer = self.context.socket(zmq.DEALER)
            configure(dealer, limits, keys)
            name = f"rollout-{i}"
            dealer.setsockopt(zmq.IDENTITY, f"{name}.{os.getpid()}".encode())
            dealer.connect(address)
            self.poller.register(dealer, zmq.POLLIN)
            self.by_socket[dealer] = Producer(name, dealer)

    def run(self) -> None:
        """Until the board says stop."""
        next_beat = 0.0
        while self.board["stop"] < ALL_STOP:
            if time.monotonic() >= next_beat:
                for producer in self.by_socket.values():
                    # a connection that was given up during its handshake has lost its Hello
                    self.send(producer, BEAT if producer.joined else hello(self.fingerprint, producer.name))
                next_beat = time.monotonic() + self.config.network.heartbeat_s
            for ready, _ in self.poller.poll(POLL_MS):
                self.drain(self.by_socket[ready])
            self.follow(self.board["version"])

    def follow(self, version: int) -> None:
        """In the place of the weight bus: every server gets the newest version, and says so."""
        for producer in self.by_socket.values():
            if producer.incarnation and producer.version < version:
                producer.version = version
                asked = m.LeaseRequest(capacity=self.capacity, version=version, incarnation=producer.incarnation)
                self.send(producer, asked)

    def drain(self, producer: Producer) -> None:
        """Everything that has arrived for one producer."""
        while True:
            try:
                frames = producer.socket.recv_multipart(flags=zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode(frames, m.FROM_REPLAY).message
            match message:
                case m.Lease():
                    self.answer(producer, message)
                case m.Ack():
                    self.acked(message)
                case m.Welcome():
                    self.board.add("joined", int(not producer.joined))
                    producer.joined, producer.incarnation = True, message.incarnation
                case m.Refused() | m.Cancel():
                    self.board.add("refused", 1)
                    sys.stderr.write(f"{producer.name}: {message}\n")

    def answer(self, producer: Producer, lease: m.Lease) -> None:
        """The next prepared group for this lease."""
        prepared = self.pool[self.next % len(self.pool)]
        self.next += 1
        size = self.send(producer, prepared.group(lease, producer.version))
        self.sent[lease.pass_, lease.index, lease.attempt] = (prepared.young.size, size)

    def acked(self, ack: m.Ack) -> None:
        """Count an accepted group; anything else is a fault of the benchmark or of replay."""
        tokens, size = self.sent.pop((ack.pass_, ack.index, ack.attempt), (0, 0))
        if ack.status != "accepted":
            self.board.add("refused", 1)
            sys.stderr.write(f"group ({ack.pass_}, {ack.index}) {ack.status}: {ack.reason}\n")
            return
        self.board.add("groups", 1)
        self.board.add("group_tokens", tokens)
        self.board.add("group_bytes", size)

    def send(self, producer: Producer, message: Message) -> int:
        """Send a message; its bytes."""
        producer.sequence += 1
        frames = encode(message, RUN_ID, producer.sequence)
        producer.socket.send_multipart(frames, copy=False)
        return sum(len(frame) for frame in frames)

    def close(self) -> None:
        """Close all sockets."""
        for producer in self.by_socket.values():
            producer.socket.close(linger=0)
        self.context.term()


def hello(fingerprint: dict[str, str], name: str, role: Any = "rollout_server") -> m.Hello:
    """The first message of a peer."""
    return m.Hello(role=role, name=name, pid=os.getpid(), host=socket.gethostname(), fingerprint=fingerprint)


# ---- the learner ----------------------------------------------------------------------------------------


class Stopped(Exception):
    """The command wants the case to end."""


class Fault(RuntimeError):
    """Replay did something that no learner could work with; the message says what."""


class Learner:
    """Rank 0 of one."""

    def __init__(self, config: Config, address: str, board: Board, checkpoint_every: int) -> None:
        self.config, self.board, self.checkpoint_every = config, board, checkpoint_every
        self.trained: set[tuple[int, int]] = set()
        keys, limits = load_keys(config.network.keys), Limits(config.network.max_message_bytes)
        self.dealer = Dealer(address, f"learner-0.{os.getpid()}", m.FROM_REPLAY, limits, keys=keys)

    def run(self) -> None:
        """Join, then step after step until the board says stop. Raises Fault, Stopped."""
        self.dealer.send(m.StatusRequest())  # its answer tells the run id
        self.wait_for(m.Status)
        self.dealer.send(hello(run_fingerprint(self.config), "learner-0", "learner"))
        self.wait_for(m.Welcome)
        step = 0
        while not self.board["stop"]:
            if self.board["hold"]:
                time.sleep(POLL_S)
                continue
            step += 1
            self.step(step)

    def step(self, step: int) -> None:
        """Take, have, commit, publish."""
        self.dealer.send(m.Take(step=step, rank=0))
        batch = self.wait_for(m.Batch)
        tokens = self.check(batch, step)
        self.dealer.send(m.Take(step=step, rank=0, have=True))
        self.wait_for(m.Proceed)
        self.dealer.send(m.Committed(step=step, digest=f"simulated-{step}"))
        if batch.checkpoint or step % self.checkpoint_every == 0:
            self.dealer.send(m.CursorRequest(step=step))
            self.wait_for(m.Cursor)
            self.dealer.send(m.Checkpointed(step=step, kept=[step]))
        self.dealer.send(m.Published(version=step, digest=f"simulated-{step}"))
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

    def wait_for(self, kind: type[Kind]) -> Kind:
        """The next message of that kind; heartbeats and the like are passed over."""
        while not self.board["stop"]:
            envelope = self.dealer.poll(POLL_S)
            if envelope is None:
                continue
            if isinstance(envelope.message, kind):
                return envelope.message
            if isinstance(envelope.message, m.Refused | m.Goodbye):
                raise Fault(f"replay: {envelope.message.reason}")
        raise Stopped

    def close(self) -> None:
        """Say Goodbye, which ends the run."""
        self.dealer.send(m.Goodbye(reason="the benchmark is over"))
        self.dealer.close()


def main() -> int:
    """Entry point of either."""
    role, folder, job = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    die_with_parent(job["parent"])
    config, board = load_config(folder / "config.yaml"), Board(folder / "board")
    if role == "producers":
        producers = Producers(config, job["address"], board, prepare(Load(**job["load"])), job["count"])
        producers.run()
        producers.close()
        return 0
    learner = Learner(config, job["address"], board, job["checkpoint_every"])
    try:
        learner.run()
    except Stopped:
        sys.stderr.write("stopped\n")
    except Fault as fault:
        sys.stderr.write(f"learner: {fault}\n")
        return 1
    finally:
        learner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
