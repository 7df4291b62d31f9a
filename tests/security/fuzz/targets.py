"""The sockets that are attacked, each with the code that reads it in a run; here replay's.

A target takes frames in and says when its reader has processed them; what its reader raises and documents is expected.
"""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import zmq

from replay import messages as m
from replay.channel import AsyncRouter, WireError, routing_id
from replay.channel.frames import Message, Registry, encode
from replay.serve import flush, take_in
from tests.security.fuzz.samples import PROMPTS
from tests.security.served_replay import service

HOST = "127.0.0.1"
RUN = "fuzz"
PATIENCE_S = 20.0
RUN_DRAINS = 20
"""A service that has seen this many batches of messages is replaced by a new one, whose prompts are not used up."""


class Vanished(RuntimeError):
    """A message that was sent was never read."""


class Target:
    """One kind of socket with its reader, to be opened first."""

    kinds: Registry

    def __init__(self) -> None:
        self.read = self.accepted = 0
        """Messages that were read so far, and those of them that were whole to their reader."""

    def count(self, messages: Iterable[object]) -> None:
        for message in messages:
            self.read += 1
            self.accepted += not isinstance(message, WireError)

    def watch(self, socket: Any) -> None:
        """Count what is polled from a blocking socket: one message, none, or a list with their senders."""
        poll = socket.poll

        def polling(timeout_s: float) -> Any:
            try:
                found = poll(timeout_s)
            except WireError as error:
                self.count([error])
                raise
            self.count([message for _, message in found] if isinstance(found, list) else [found] * (found is not None))
            return found

        socket.poll = polling

    async def open(self) -> None:
        """Make the socket and its reader, and connect to it."""

    def given(self) -> Mapping[str, Any]:
        """Fields by name that a message must have to be looked at."""
        return {}

    def send(self, frames: list[bytes]) -> None: ...

    async def drain(self, count: int) -> None:
        """Have the reader read that many messages. Raises what it raises and does not document, or Vanished."""

    def close(self) -> None: ...


class RouterTarget(Target):
    """A ROUTER of ours, to which several bare DEALERs send in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._context = zmq.Context()
        self._peers: list[zmq.Socket[bytes]] = []
        self._turn = self._drained = 0

    def connect(self, address: str, identity: str) -> "zmq.Socket[bytes]":
        made = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.IDENTITY, routing_id(identity))
        made.setsockopt(zmq.LINGER, 0)
        made.set_hwm(0)
        made.connect(address)
        self._peers.append(made)
        return made

    def send(self, frames: list[bytes]) -> None:
        self._turn += 1
        peer = self._peers[self._turn % len(self._peers)]
        peer.send_multipart(frames)
        discard(peer)

    def leave(self) -> None:
        while self._peers:
            self._peers.pop().close()


class ReplayTarget(RouterTarget):
    """AsyncRouter, take_in and flush of the main loop, and the whole Service.

    Four peers: two rollout servers and a learner rank that joined, and one of whom nothing is known.
    """

    kinds = m.TO_REPLAY

    async def open(self) -> None:
        self._router = AsyncRouter(HOST, 0, RUN, m.TO_REPLAY)
        self._receive, self._router.receive = self._router.receive, self._counted  # type: ignore[method-assign]
        await self._begin()

    async def _counted(self) -> Any:
        found = await self._receive()
        if found is not None:
            self.count([found[1]])
        return found

    def given(self) -> Mapping[str, Any]:
        return {"pass_": 0, "attempt": 1}

    async def drain(self, count: int) -> None:
        await self._serve(count)
        self._service.tick(time.monotonic())
        await flush(self._router, self._service)
        self._drained += 1
        if self._service.ended is not None or self._drained % RUN_DRAINS == 0:  # a learner may end a run
            await self._begin()

    async def _serve(self, count: int) -> None:
        """Replay's main loop for that many messages."""
        goal, deadline = self.read + count, time.monotonic() + PATIENCE_S
        while self.read < goal:
            if time.monotonic() > deadline:
                raise Vanished(f"{goal - self.read} of {count} messages")
            await self._router.wait(0.2)
            await take_in(self._router, self._service)
            await flush(self._router, self._service)
            for peer in self._peers:
                discard(peer)

    async def _begin(self) -> None:
        """A new run, with peers under new names: who has once sent a large number is refused all lower ones."""
        self._service = service(PROMPTS, 2)
        self.leave()
        for name, role in (("l0", "learner"), ("r0", "rollout_server"), ("r1", "rollout_server"), ("x", "")):
            peer = self.connect(self._router.address, f"{name}.{self._drained}")
            hello = m.Hello(role=role, name=name, pid=1, host="h") if role else m.StatusRequest()  # type: ignore[arg-type]
            peer.send_multipart(encode(hello, RUN, 1))
            peer.send_multipart(encode(m.LeaseRequest(capacity=4, version=0), RUN, 2))
            await self._serve(2)

    def close(self) -> None:
        self.leave()
        self._context.term()
        self._router.close()


class DealerTarget(Target):
    """A DEALER of ours, which talks to a ROUTER that sends rubbish."""

    def __init__(self) -> None:
        super().__init__()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.set_hwm(0)
        self.address = f"tcp://{HOST}:{self._socket.bind_to_random_port(f'tcp://{HOST}')}"
        self._identity = b""

    def meet(self, dealer: Any, greeting: Message) -> None:
        """Wait for the peer with this DEALER and send it a first message, from which it has the run's id."""
        self._identity = dealer._socket.getsockopt(zmq.IDENTITY)
        frames = [bytes(frame) for frame in encode(greeting, RUN, 1)]
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self.send(frames)
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart([self._identity, *frames])
        discard(self._socket)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def discard(socket: "zmq.Socket[bytes]") -> None:
    while socket.poll(0):
        socket.recv_multipart()
