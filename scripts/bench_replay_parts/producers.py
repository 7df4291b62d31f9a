"""`python -m scripts.bench_replay_parts.producers`: many simulated rollout servers in one process.

Each has a DEALER and an identity of its own, and keeps to the protocol: Hello, LeaseRequest, a Group for every Lease,
Heartbeats. Groups are prepared before, so that this process takes little of the machine's time.
"""

import argparse
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from configs.loading import load as load_config
from configs.schema import Config
from replay import messages as m
from replay.channel import Limits, Message, configure, decode, encode, load_keys
from replay.fingerprint import run_fingerprint
from replay.lifeline import die_with_parent
from scripts.bench_replay_parts.board import ALL_STOP, Board
from scripts.bench_replay_parts.payloads import Prepared, prepare
from scripts.bench_replay_parts.settings import Load

POLL_MS = 20
SPARE_SOCKETS = 16
BEAT = m.Heartbeat(activity="simulated", gauges={"tokens_per_s": 1.0})


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

    def __init__(
        self, config: Config, address: str, run_id: str, board: Board, pool: list[Prepared], count: int
    ) -> None:
        self.config, self.run_id, self.board, self.pool = config, run_id, board, pool
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
        for producer in self.by_socket.values():
            self.send(producer, self.hello(producer))
        next_beat = time.monotonic() + self.config.network.heartbeat_s
        while self.board["stop"] < ALL_STOP:
            for ready, _ in self.poller.poll(POLL_MS):
                self.drain(self.by_socket[ready])
            self.follow(self.board["version"])
            if time.monotonic() >= next_beat:
                for producer in self.by_socket.values():
                    # a connection that was given up during its handshake has lost its Hello
                    self.send(producer, BEAT if producer.joined else self.hello(producer))
                next_beat = time.monotonic() + self.config.network.heartbeat_s

    def hello(self, producer: Producer) -> m.Hello:
        """Its first message."""
        return m.Hello(
            role="rollout_server",
            name=producer.name,
            pid=os.getpid(),
            host=socket.gethostname(),
            fingerprint=self.fingerprint,
        )

    def follow(self, version: int) -> None:
        """What the weight bus would do: every server gets the newest version, and says so."""
        for producer in self.by_socket.values():
            if producer.incarnation and producer.version < version:
                producer.version = version
                self.send(
                    producer,
                    m.LeaseRequest(capacity=self.capacity, version=version, incarnation=producer.incarnation),
                )

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
        self.sent[lease.pass_, lease.index, lease.attempt] = (prepared.num_tokens, size)

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
        frames = encode(message, self.run_id, producer.sequence)
        producer.socket.send_multipart(frames, copy=False)
        return sum(len(frame) for frame in frames)

    def close(self) -> None:
        """Close all sockets."""
        for producer in self.by_socket.values():
            producer.socket.close(linger=0)
        self.context.term()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_replay_parts.producers", description=__doc__)
    parser.add_argument("--config", required=True, help="the case's configuration")
    parser.add_argument("--load", type=Path, required=True, help="JSON file: the fields of Load")
    parser.add_argument("--address", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--board", type=Path, required=True)
    parser.add_argument("--count", type=int, required=True, help="producers")
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent)
    pool = prepare(Load.read(args.load))
    board = Board(args.board)
    producers = Producers(load_config(args.config), args.address, args.run_id, board, pool, args.count)
    producers.run()
    producers.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
