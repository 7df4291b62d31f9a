"""The sockets that are attacked, each with the code that reads it in a run.

    replay      AsyncRouter, replay/serve.py (take_in, flush) and the whole Service
    rollout     AsyncDealer and RolloutServer.handle; prompts are not generated: its generator refuses every lease
    learner     Dealer and BatchReader
    publisher   the weight bus's Router and the Publisher's thread with its membership; the data plane is a stand-in
    subscriber  the weight bus's Dealer and Subscriber.receive; the data plane is a stand-in

A target takes frames in and says when its reader has processed them; what its reader raises and documents is expected.
"""

import time
from collections.abc import Mapping
from typing import Any, Protocol

import zmq

from configs.schema import Config
from replay import messages as m
from replay.channel import AsyncRouter, WireError
from replay.channel.frames import Message, Registry, encode
from replay.prompts import PromptSource
from replay.serve import flush, take_in
from replay.service import Service
from tests.replay.simulation.journal import MemoryJournal
from tests.security.fuzz.samples import GROUP_SIZE, PROMPTS

HOST = "127.0.0.1"
RUN = "fuzz"
PATIENCE_S = 20.0
RUN_DRAINS = 20
"""A service that has seen this many batches of messages is replaced by a new one, whose prompts are not used up."""


class Vanished(RuntimeError):
    """A message that was sent was never read."""


class Target(Protocol):
    """One kind of socket."""

    kinds: Registry
    accepted: int
    """Messages so far that were whole to the one who read them."""

    async def open(self) -> None:
        """Make the socket and its reader, and connect to it."""

    def given(self) -> Mapping[str, Any]:
        """Fields by name that a message must have to be looked at."""

    def send(self, frames: list[bytes]) -> None:
        """Put a message on the wire."""

    async def drain(self, count: int) -> None:
        """Have the reader read that many messages. Raises what it raises and does not document, or Vanished."""

    def close(self) -> None:
        """Close everything."""


def config() -> Config:
    """Of a small run."""
    return Config.model_validate(
        {
            "model": {"path": "unused"},
            "data": {"train": "unused"},
            "rollout": {"group_size": GROUP_SIZE, "groups_per_step": 4, "max_new_tokens": 8},
            "replay": {"async_lag": 1, "lease_s": 10, "max_attempts": 3, "partial_rollouts": True},
            "placement": {"device": "cpu", "split": "1:1"},
        }
    )


class Counted:
    """A reader of messages that counts what it has read."""

    def __init__(self) -> None:
        self.count = self.accepted = 0

    def wrap(self, read: Any) -> Any:
        """`read`, counting what is not None."""

        async def reading(*arguments: Any) -> Any:
            found = await read(*arguments)
            if found is not None:
                self.count += 1
                self.accepted += not isinstance(found[1], WireError)
            return found

        return reading


class ReplayTarget:
    """Four peers: two rollout servers and a learner rank that joined, and one of whom nothing is known."""

    kinds = m.TO_REPLAY

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._turn = self._drained = 0

    async def open(self) -> None:
        self._router = AsyncRouter(HOST, 0, RUN, m.TO_REPLAY)
        self._read = Counted()
        self._router.receive = self._read.wrap(self._router.receive)  # type: ignore[method-assign]
        self._peers: list[zmq.Socket[bytes]] = []
        await self._begin()

    @property
    def accepted(self) -> int:
        return self._read.accepted

    def given(self) -> Mapping[str, Any]:
        return {"pass_": 0, "attempt": 1}

    def send(self, frames: list[bytes]) -> None:
        self._turn += 1
        self._peers[self._turn % len(self._peers)].send_multipart(frames)

    async def drain(self, count: int) -> None:
        await self._serve(count)
        self._service.tick(time.monotonic())
        await flush(self._router, self._service)
        self._drained += 1
        if self._service.ended is not None or self._drained % RUN_DRAINS == 0:  # a learner may end a run
            await self._begin()

    async def _serve(self, count: int) -> None:
        """Replay's main loop for that many messages."""
        goal, deadline = self._read.count + count, time.monotonic() + PATIENCE_S
        while self._read.count < goal:
            if time.monotonic() > deadline:
                raise Vanished(f"{goal - self._read.count} of {count} messages")
            await self._router.wait(0.2)
            await take_in(self._router, self._service)
            await flush(self._router, self._service)
            for peer in self._peers:
                discard(peer)

    async def _begin(self) -> None:
        """A new run, with peers under new names: who has once sent a large number is refused all lower ones."""
        rows = [
            {"prompt": f"p{i}", "ground_truth": str(i), "data_source": "t", "extra_info": {}, "columns": {}}
            for i in range(PROMPTS)
        ]
        source = PromptSource(rows, shuffle=False, seed=0)
        self._service = Service(config(), source, rows[:2], time.monotonic(), journal=MemoryJournal())
        for peer in self._peers:
            peer.close()
        self._peers = []
        for name, role in (("l0", "learner"), ("r0", "rollout_server"), ("r1", "rollout_server"), ("x", "")):
            peer = connected(self._context, self._router.address, f"{name}.{self._drained}")
            self._peers.append(peer)
            hello = m.Hello(role=role, name=name, pid=1, host="h") if role else m.StatusRequest()  # type: ignore[arg-type]
            peer.send_multipart(encode(hello, RUN, 1))
            peer.send_multipart(encode(m.LeaseRequest(capacity=4, version=0), RUN, 2))
            await self._serve(2)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._context.term()
        self._router.close()


class FakeServer:
    """The ROUTER that a DEALER of ours talks to."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.set_hwm(0)
        self.address = f"tcp://{HOST}:{self._socket.bind_to_random_port(f'tcp://{HOST}')}"
        self._identity = b""

    def meet(self, identity: str, greeting: Message, run_id: str = RUN) -> None:
        """Wait for a peer and send it a first message, from which it has the run's id."""
        self._identity = identity.encode()
        frames = [bytes(frame) for frame in encode(greeting, run_id, 1)]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.send(frames)
                return
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def send(self, frames: list[bytes]) -> None:
        """Send to the peer; what it said is thrown away."""
        self._socket.send_multipart([self._identity, *frames])
        discard(self._socket)

    def close(self) -> None:
        """Close."""
        self._socket.close()
        self._context.term()


def connected(context: "zmq.Context[Any]", address: str, identity: str) -> "zmq.Socket[bytes]":
    """A bare DEALER."""
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.IDENTITY, identity.encode())
    made.setsockopt(zmq.LINGER, 0)
    made.set_hwm(0)
    made.connect(address)
    return made


def discard(socket: "zmq.Socket[bytes]") -> None:
    """Throw away what has arrived."""
    while socket.poll(0):
        socket.recv_multipart()
