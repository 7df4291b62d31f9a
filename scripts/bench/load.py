"""What the replay benchmark puts around the real replay process.

Producers are many simulated rollout servers in one thread: each has a DEALER and an identity of its own, and keeps to
the protocol (Hello, LeaseRequest, a Group for every Lease, Heartbeats). Their groups are made before the measurement:
random, all different, of lognormal lengths. The learner, in another thread, has the real one's end of the channel: it
takes, commits and publishes; it trains nothing, and checks that no group comes twice and no token is too old.
"""

import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq

from configs.schema import Config
from learner.batches import BatchReader
from replay import messages as m
from replay.channel import Limits, Message, configure, decode, encode, load_keys
from replay.fingerprint import run_fingerprint
from scripts.bench.cases import Prepared

RUN_ID = "bench"
POLL_MS = 20
SPARE_SOCKETS = 16
BEAT = m.Heartbeat(activity="simulated", gauges={"tokens_per_s": 1.0})


class Fault(RuntimeError):
    """Replay did something that no peer could work with; the message says what."""


@dataclass(slots=True)
class Counts:
    """What has happened so far; each number has one thread that writes it."""

    version: int = 0
    """Newest version that the learner published; in a run the weight bus would deliver it to rollout servers."""
    steps: int = 0
    """Committed steps, their answer tokens, and the arrays of their batches."""
    tokens: int = 0
    batch_bytes: int = 0
    joined: int = 0
    """Producers that are welcome."""
    groups: int = 0
    """Accepted groups, their answer tokens and their frames."""
    group_tokens: int = 0
    group_bytes: int = 0


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
    """All producers."""

    def __init__(self, config: Config, address: str, counts: Counts, pool: list[Prepared], count: int) -> None:
        self.config, self.counts, self.pool = config, counts, pool
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

    def run(self, over: threading.Event) -> None:
        """Until it is over. Raises Fault when replay refuses something."""
        next_beat = 0.0
        while not over.is_set():
            if time.monotonic() >= next_beat:
                for producer in self.by_socket.values():
                    # a connection that was given up during its handshake has lost its Hello
                    producer.send(BEAT if producer.joined else self.hello(producer.name))
                next_beat = time.monotonic() + self.config.network.heartbeat_s
            for ready, _ in self.poller.poll(POLL_MS):
                self.drain(self.by_socket[ready])
            self.follow(self.counts.version)
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
                    self.counts.groups += 1
                    self.counts.group_tokens += tokens
                    self.counts.group_bytes += size
                case m.Welcome() as welcome:
                    self.counts.joined += not producer.joined
                    producer.joined, producer.incarnation = True, welcome.incarnation
                case m.Ack() | m.Refused() | m.Cancel() as message:
                    raise Fault(f"replay refused what {producer.name} sent: {message}")


class Learner:
    """Rank 0 of one."""

    def __init__(self, config: Config, address: str, counts: Counts, checkpoint_every: int) -> None:
        self.config, self.counts, self.checkpoint_every = config, counts, checkpoint_every
        self.trained: set[tuple[int, int]] = set()
        self.batches = BatchReader(config, address, rank=0, fingerprint=run_fingerprint(config))

    def run(self, over: threading.Event, hold: bool) -> None:
        """Join, then step after step until it is over; its Goodbye ends the run. With `hold` it takes nothing.

        Raises:
            Fault: see `check`.
        """
        self.batches.connect()
        self.batches.join(version=0, digest="", bus_address=None, cursor=None)
        while not over.wait(0 if not hold else 0.1):
            if not hold:
                self.step(self.counts.steps + 1)
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
        self.counts.version = step
        self.counts.tokens += tokens
        self.counts.batch_bytes += sum(getattr(batch, name).nbytes for name in batch.ARRAYS)
        self.counts.steps = step

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
