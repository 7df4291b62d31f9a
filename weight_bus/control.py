"""The publisher's socket of the control plane, with a wake-up for its thread. A subscriber has a Dealer."""

import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import zmq

from replay.channel import Envelope, Hub, Keys, Message, WireError, encode
from weight_bus.messages import TO_PUBLISHER

SWITCH_S = 0.0005
MESSAGES_PER_TURN = 256


def wake_quickly() -> None:
    """For threads of the bus beside computing ones: an update has a dozen waits for the interpreter, now of 0.5 ms."""
    sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))


class Router(Hub):
    """The publisher's end, used by the bus thread only (except `wake`)."""

    def __init__(self, host: str, port: int, run_id: str, *, keys: Keys | None = None, insecure: bool = False) -> None:
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        super().__init__(host, port, run_id, TO_PUBLISHER, keys=keys, insecure=insecure)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wakes.fileno(), zmq.POLLIN)

    def send(self, identity: str, message: Message, run_id: str = "") -> str:
        """Queue a message. Returns "", or the symptom why it cannot be sent: closed or full.

        `run_id` answers a peer of another run, which refuses anything that does not carry its own.
        """
        return self._queue(identity, encode(message, run_id or self.run_id, next(self._sequence)))

    def send_all(self, identities: Iterable[str], message: Message) -> None:
        """Queue one message for several, encoded once. Those that it cannot be sent to are silent, or slow, later."""
        frames = encode(message, self.run_id, next(self._sequence))
        for identity in identities:
            self._queue(identity, frames)

    def _queue(self, identity: str, frames: Sequence[bytes | memoryview]) -> str:
        if (route := self._arrivals.route(identity)) is None:
            return "closed"
        try:
            self._socket.send_multipart([route, *frames], flags=zmq.NOBLOCK, copy=False)
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
            arrived.append(self._arrivals.take(self._socket.recv_multipart(copy=False), None))
        return arrived

    def wake(self) -> None:
        """End the poll, the present or the next one; from any thread."""
        with suppress(OSError):  # full of wake-ups already, or closed
            self._waker.send(b"\0")

    def close(self) -> None:
        """Send what is queued for up to a second, then close."""
        super().close()
        self._wakes.close()
        self._waker.close()

    def _arrives(self, timeout_s: float) -> bool:
        """Wait for a message or a wake-up; whether there is a message."""
        if self._wakes.fileno() in dict(self._poller.poll(max(0, int(timeout_s * 1000)))):
            with suppress(BlockingIOError):
                while self._wakes.recv(4096):
                    pass
        return bool(self._socket.poll(0))
