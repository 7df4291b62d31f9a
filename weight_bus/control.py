"""Sockets of the control plane: the publisher's ROUTER, a subscriber's DEALER, and a wake-up for either thread."""

import socket
import sys
from collections import deque
from contextlib import ExitStack, suppress

import zmq

from replay import channel
from replay.channel import (
    Arrivals,
    ChannelError,
    DuplicateMessage,
    Envelope,
    Gate,
    HandshakeWatch,
    Keys,
    Limits,
    Message,
    WireError,
    bind,
    configure,
    decode,
    encode,
    routing_id,
    sequence_numbers,
)
from weight_bus.messages import TO_PUBLISHER, TO_SUBSCRIBER, Heartbeat

REMEMBERED = 1024  # messages of the publisher whose copies are known as such
SWITCH_S = 0.0005
MESSAGES_PER_TURN = 256


def wake_quickly() -> None:
    """For threads of the bus beside computing ones: an update has a dozen waits for the interpreter, now of 0.5 ms."""
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))


class _End:
    """What both ends share: a socket, a poll that can be woken, the numbers of what is sent."""

    def __init__(self, kind: int, run_id: str) -> None:
        self.run_id = run_id
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._sequence = sequence_numbers()
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._watches = ExitStack()  # of the socket, closed before it
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakes.fileno(), zmq.POLLIN)

    def wake(self) -> None:
        """End the poll, the present or the next one; from any thread."""
        with suppress(OSError):  # full of wake-ups already, or closed
            self._waker.send(b"\0")

    def _arrives(self, timeout_s: float) -> bool:
        """Wait for a message or a wake-up; whether there is a message."""
        if self._wakes.fileno() in dict(self._poller.poll(max(0, int(timeout_s * 1000)))):
            with suppress(BlockingIOError):
                while self._wakes.recv(4096):
                    pass
        return bool(self._socket.poll(0))

    def close(self) -> None:
        """Send what is queued for up to a second, then close."""
        self._watches.close()
        self._socket.close(linger=1000)
        self._context.term()
        self._wakes.close()
        self._waker.close()


class Router(_End):
    """The publisher's end, used by the bus thread only (except `wake`)."""

    def __init__(self, host: str, port: int, run_id: str, *, keys: Keys | None = None, insecure: bool = False) -> None:
        super().__init__(zmq.ROUTER, run_id)
        try:
            configure(self._socket, Limits(), keys)
            gate = Gate(self._context, self._socket, keys) if keys is not None else None
            if gate is not None:
                self._watches.callback(gate.close)
            self.refused: dict[str, int] = gate.refused if gate is not None else {}
            """Handshakes that the keys refused, by reason; empty without keys."""
            roster = gate.roster if gate is not None else None
            self._arrivals = Arrivals(TO_PUBLISHER, Limits().max_message_bytes, roster)
            self.address = bind(self._socket, host, port, insecure=insecure)
        except ChannelError:
            self.close()
            raise

    def send(self, identity: str, message: Message, run_id: str = "") -> str:
        """Queue a message. Returns "", or the symptom why it cannot be sent: closed or full.

        `run_id` answers a peer of another run, which refuses anything that does not carry its own.
        """
        if (route := self._arrivals.route(identity)) is None:
            return "closed"
        frames = [route, *encode(message, run_id or self.run_id, next(self._sequence))]
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return "closed"
            if error.errno == zmq.EAGAIN:
                return "full"
            raise
        return ""

    def poll(self, timeout_s: float) -> list[tuple[str, Envelope | WireError]]:
        """What has arrived within `timeout_s`, at most MESSAGES_PER_TURN: a flood must not hold up what is due.

        Corrupt messages come as their error, the bus must go on.
        """
        arrived: list[tuple[str, Envelope | WireError]] = []
        while len(arrived) < MESSAGES_PER_TURN and self._arrives(0.0 if arrived else timeout_s):
            # of any run: a peer of another run gets an answer that says so
            identity, received = self._arrivals.take(self._socket.recv_multipart(copy=False), None)
            arrived.append((identity, received))
        return arrived


class Dealer(_End):
    """A subscriber's end, used by the thread that receives (except `wake`)."""

    def __init__(self, address: str, identity: str, run_id: str, *, keys: Keys | None = None) -> None:
        super().__init__(zmq.DEALER, run_id)
        # no window like the publisher's: a publisher that restarts with its clock behind counts from below
        self._had: deque[int] = deque(maxlen=REMEMBERED)
        configure(self._socket, Limits(), keys)
        self.route = routing_id(identity)
        self._socket.setsockopt(zmq.IDENTITY, self.route)
        self._handshake = HandshakeWatch(self._context, self._socket, address, identity, keys)
        self._watches.callback(self._handshake.close)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            reason = f"cannot connect to the weight bus at {address!r}: {error.strerror}; expected tcp://host:port"
            raise ChannelError(reason, "closed") from error

    def send(self, message: Message) -> bool:
        """Queue a message; False when the queue is full (or refused: see `poll`)."""
        try:
            self._socket.send_multipart(encode(message, self.run_id, next(self._sequence)), flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def poll(self, timeout_s: float) -> Message | WireError | None:
        """The next message within `timeout_s`, or None. Raises ChannelError: the publisher refuses this one (keys)."""
        if not self._arrives(timeout_s):
            self._handshake.check()
            return None
        try:
            envelope = decode(self._socket.recv_multipart(), TO_SUBSCRIBER)
        except WireError as error:
            return error
        if self.run_id and envelope.run_id != self.run_id:
            return WireError(f"run id {envelope.run_id!r}, this subscriber belongs to {self.run_id!r}")
        if envelope.sequence in self._had:
            # a Begin twice would wait for a broadcast that is another's, which gloo ends the process for
            return DuplicateMessage(f"{type(envelope.message).__name__} number {envelope.sequence} came before")
        self._had.append(envelope.sequence)
        return envelope.message


class Pulse(channel.Pulse):
    """A subscriber's heartbeats."""

    def __init__(self, address: str, route: bytes, run_id: str, period_s: float, keys: Keys | None = None) -> None:
        self.session = ""  # beats for this session; empty beats for none. Set by the receiving thread
        super().__init__(address, route, self._of_session, period_s, keys=keys, run_id=run_id)

    def _of_session(self) -> Heartbeat | None:
        session = self.session
        return Heartbeat(session=session) if session else None
