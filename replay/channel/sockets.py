"""ROUTER and DEALER sockets with bounded queues, bounded messages, keys and named errors.

Nothing here blocks without a deadline: a receive says what it waits for, and its error says who, how long
and when the peer was last heard.
"""

import asyncio
import time
from typing import Any, ClassVar

import zmq
import zmq.asyncio

from configs.schema import is_loopback
from replay.channel.admission import Arrivals, contents, routing_id, sequence_numbers
from replay.channel.frames import Envelope, Message, Registry, WireError, decode, encode
from replay.channel.gate import Gate
from replay.channel.handshake import HandshakeWatch
from replay.channel.keys import ChannelError, Keys, KeysError

CURVE_BYTES = 64
"""At most what encryption adds to a frame."""
OPTIONS = {
    zmq.LINGER: 0,
    zmq.SNDHWM: 4096,
    zmq.RCVHWM: 4096,
    zmq.HANDSHAKE_IVL: 5000,  # ms; a connection that has not proven its key by then is closed
    # ms; how often a connection is probed, and how long it may stay without an answer: a half-open one must end on both
    # sides. An answer waits behind the message that its sender is writing: room for large ones on slow links.
    zmq.HEARTBEAT_IVL: 5000,
    zmq.HEARTBEAT_TIMEOUT: 30000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.RECONNECT_IVL: 50,
    zmq.RECONNECT_IVL_MAX: 1000,
}
LOOK_S = 0.25
"""A wait that hears nothing looks this often whether the server has refused the connection."""


MAX_MESSAGE_BYTES = 256 * 1024 * 1024


def configure(socket: "zmq.Socket[Any]", keys: Keys | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
    """Options of every socket. Raises KeysError: a ROUTER without the keys of a server."""
    for option, value in OPTIONS.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + (CURVE_BYTES if keys is not None else 0))
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # a peer that reconnects while its old connection is half open would not be heard, not even after that one ends
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if keys is not None:
        keys.apply(socket)


def bind(socket: "zmq.Socket[Any]", host: str, port: int, *, insecure: bool = False) -> str:
    """Bind and return `tcp://host:port`; port 0 takes a free one.

    Raises:
        KeysError: the host leaves the loopback interface without keys, and `insecure` does not allow it.
        ChannelError: the port is taken or the host is not an address of this machine.
    """
    if not (is_loopback(host) or insecure or socket.getsockopt(zmq.MECHANISM) == zmq.CURVE):
        raise KeysError(
            f"network.host: tcp://{host}:{port} leaves the loopback interface and the socket has no keys; make them"
            " with python -m replay.keys --out keys and set network.keys=keys, or set network.insecure=true on a"
            " network that you trust"
        )
    try:
        if port == 0:
            port = socket.bind_to_random_port(f"tcp://{host}")
        else:
            socket.bind(f"tcp://{host}:{port}")
    except zmq.ZMQError as error:
        raise ChannelError(
            f"cannot bind tcp://{host}:{port}: {error.strerror}; is the port taken?", "closed"
        ) from error
    return f"tcp://{host}:{port}"


class _Connection:
    """What both kinds of DEALER share: one connection, one identity, messages of one run."""

    _new_context: ClassVar[type["zmq.Context[Any]"]] = zmq.Context

    def __init__(
        self,
        address: str,
        identity: str,
        accepted: Registry,
        *,
        keys: Keys | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.address, self.identity = address, identity
        self.run_id = ""
        """Of the first message that comes; from then on no other is accepted."""
        self.last_heard = time.monotonic()
        """When a message of this run came; what is refused is no sign of it."""
        self._accepted = accepted
        self._sequence = sequence_numbers()
        self._context = self._new_context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        configure(self._socket, keys, max_message_bytes)
        self.route = routing_id(identity)
        self._socket.setsockopt(zmq.IDENTITY, self.route)
        self._handshake = HandshakeWatch(self._context, self._socket, address, identity, keys)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            reason = f"{identity} cannot connect to {address!r}: {error.strerror}; expected tcp://host:port"
            raise ChannelError(reason, "closed") from error

    def close(self, linger_ms: int = 1000) -> None:
        """Send what is queued for up to a second, then close."""
        self._handshake.close()
        self._socket.close(linger=linger_ms)
        self._context.term()

    def _encode(self, message: Message) -> list[bytes | memoryview]:
        return encode(message, self.run_id, next(self._sequence))

    def _decode(self, parts: list[zmq.Frame]) -> Envelope:
        envelope = decode(contents(parts), self._accepted)
        self.run_id = self.run_id or envelope.run_id
        if envelope.run_id != self.run_id:
            raise WireError(f"run id {envelope.run_id!r}, this peer belongs to {self.run_id!r}")
        self.last_heard = time.monotonic()
        return envelope


class Dealer(_Connection):
    """The blocking end of a peer (learner ranks, launcher, tests). Not safe to share between threads."""

    def send(self, message: Message) -> None:
        """Queue a message. Raises ChannelError when the queue to the peer is full, or the peer refuses this one."""
        try:
            self._socket.send_multipart(self._encode(message), flags=zmq.NOBLOCK, copy=False)
        except zmq.Again as error:
            self._handshake.check()
            raise ChannelError(f"{self.identity}: queue to {self.address} is full", "full") from error

    def poll(self, timeout_s: float) -> Envelope | None:
        """The next message within `timeout_s` seconds, or None.

        Raises WireError when it is corrupt, ChannelError when the peer refuses this one (keys).
        """
        deadline = time.monotonic() + timeout_s
        while not self._socket.poll(_look_ms(deadline)):
            self._handshake.check()
            if time.monotonic() >= deadline:
                return None
        return self._decode(self._socket.recv_multipart(copy=False))

    def __enter__(self) -> "Dealer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncDealer(_Connection):
    """The asyncio end of a peer (rollout servers)."""

    _new_context = zmq.asyncio.Context

    async def send(self, message: Message) -> None:
        """Queue a message; waits while the queue to the peer is full. ChannelError when the peer refuses this one."""
        frames = self._encode(message)
        while True:
            try:
                await self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
                return
            except zmq.Again:
                self._handshake.check()
            await self._socket.poll(int(LOOK_S * 1000), zmq.POLLOUT)

    async def receive(self, timeout_s: float) -> Envelope | None:
        """As `Dealer.poll`. Polls first, then reads: a receive that is cancelled may lose its message."""
        deadline = time.monotonic() + timeout_s
        while not await self._socket.poll(_look_ms(deadline)):
            self._handshake.check()
            if time.monotonic() >= deadline:
                return None
        return self._decode(await self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False))


class Hub:
    """What both kinds of ROUTER share: one socket, peers by identity."""

    _new_context: ClassVar[type["zmq.Context[Any]"]] = zmq.Context

    def __init__(
        self,
        host: str,
        port: int,
        run_id: str,
        accepted: Registry,
        *,
        keys: Keys | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        insecure: bool = False,
    ) -> None:
        self.run_id = run_id
        self._sequence = sequence_numbers()
        self._context = self._new_context()
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._gate: Gate | None = None
        self._woken: asyncio.Future[None] | None = None
        try:
            configure(self._socket, keys, max_message_bytes)
            if keys is not None:
                self._gate = Gate(self._context, self._socket, keys)
            self._arrivals = Arrivals(accepted, max_message_bytes, self._gate.roster if self._gate else None)
            self.address = bind(self._socket, host, port, insecure=insecure)
        except ChannelError:
            self.close()
            raise

    def close(self) -> None:
        """Send what is queued for up to a second, then close."""
        if self._gate is not None:
            self._gate.close()
        self._socket.close(linger=1000)
        self._context.term()


class AsyncRouter(Hub):
    """The asyncio hub at replay."""

    _new_context = zmq.asyncio.Context

    async def send(self, identity: str, message: Message) -> bool:
        """Queue a message to one peer; False when it has no connection, a full queue, or a key that was removed."""
        if (route := self._arrivals.route(identity)) is None:
            return False
        frames = [route, *encode(message, self.run_id, next(self._sequence))]
        try:
            await self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    async def wait(self, timeout_s: float) -> bool:
        """Wait for a message or `wake`, for at most `timeout_s` seconds; whether there is a message."""
        self._woken = self._woken or asyncio.get_running_loop().create_future()
        poll: asyncio.Future[Any] = asyncio.ensure_future(self._socket.poll(int(timeout_s * 1000)))
        await asyncio.wait([poll, self._woken], return_when=asyncio.FIRST_COMPLETED)
        if self._woken.done():
            self._woken = None
        return bool(poll.result()) if poll.done() else not poll.cancel()

    def wake(self) -> None:
        """End the present wait, or the next one at once. In the thread of the event loop."""
        self._woken = self._woken or asyncio.get_running_loop().create_future()
        if not self._woken.done():
            self._woken.set_result(None)

    async def receive(self) -> tuple[str, Envelope | WireError] | None:
        """The next (identity, message), or None when there is none now; a refused message comes as its WireError.

        Never waits (see `wait`): a receive that is cancelled, by a timeout say, may lose its message.
        """
        try:
            parts = await self._socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        return self._arrivals.take(parts, self.run_id)

    @property
    def refused(self) -> int:
        """Handshakes that were refused for their keys, so far."""
        return sum(self._gate.refused.values()) if self._gate is not None else 0


def _look_ms(deadline: float) -> int:
    """Milliseconds until the deadline, or until the next look at the handshake."""
    return max(0, int(1000 * min(LOOK_S, deadline - time.monotonic())))
