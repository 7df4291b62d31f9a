"""Connections as ZeroMQ has them: in order each way, and what a dying process had in hand is lost."""

import random
from collections import deque
from dataclasses import dataclass, field

from replay.channel import Message
from replay.messages import EvaluationResult


@dataclass(slots=True)
class Connection:
    to_replay: deque[Message] = field(default_factory=deque)
    from_replay: deque[Message] = field(default_factory=deque)
    open: bool = True
    """False once the peer's process is dead; what it had sent may still arrive."""


class Network:
    """All connections by identity; loses, doubles and swaps messages when told to."""

    def __init__(self, rng: random.Random, noise: float) -> None:
        self.rng, self.noise = rng, noise
        self.connections: dict[str, Connection] = {}

    def connect(self, identity: str) -> None:
        self.connections[identity] = Connection()

    def send(self, identity: str, message: Message) -> None:
        connection = self.connections[identity]
        if connection.open:
            self._put(connection.to_replay, message)

    def answer(self, identity: str, message: Message) -> bool:
        """From replay to a peer; False when that is dead."""
        connection = self.connections.get(identity)
        if connection is None or not connection.open:
            return False
        self._put(connection.from_replay, message)
        return True

    def close(self, identity: str) -> None:
        """The peer is killed: the last messages that it has sent may not have left its process."""
        connection = self.connections[identity]
        connection.open = False
        connection.from_replay.clear()
        for _ in range(self.rng.randint(0, min(2, len(connection.to_replay)))):
            connection.to_replay.pop()

    def replay_crashed(self) -> None:
        """Replay is killed: what was on the wire is lost, what peers still had in their queues arrives later."""
        for connection in self.connections.values():
            for _ in range(self.rng.randint(0, len(connection.to_replay))):
                connection.to_replay.popleft()
            for _ in range(self.rng.randint(0, len(connection.from_replay))):
                connection.from_replay.pop()

    def waiting(self) -> list[str]:
        return [identity for identity, connection in self.connections.items() if connection.to_replay]

    def _put(self, queue: deque[Message], message: Message) -> None:
        draw = self.rng.random() if self.noise else 1.0
        if draw < self.noise:
            return
        queue.append(message)
        if draw < 2 * self.noise:
            queue.append(message)
        elif draw < 3 * self.noise and len(queue) > 1 and not isinstance(message, EvaluationResult):
            # results of another policy of the same version are told apart by their place in the order of a connection
            queue[-1], queue[-2] = queue[-2], queue[-1]
