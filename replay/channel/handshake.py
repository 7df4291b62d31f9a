"""Why a connection does not come about, from the socket's own monitor: ZeroMQ itself retries and says nothing.

Without it a client that is refused would wait until its deadline and then report a silent peer.
"""

import itertools
import logging
import time
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from replay.channel.keys import CLIENTS, PUBLIC, SERVER, KeyRefused, Keys

log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""A server that closes every handshake for this long without a word has refused it (it may just be starting)."""
MANY = 20
"""And this often: one now and then is a server that died, or was stopped, just then."""
MECHANISM_MISMATCH = 0x11000002
"""ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: one side speaks CURVE, the other does not."""
CRYPTOGRAPHIC = 0x11000001
"""ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: what the other side sent was made with another key."""
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

_numbers = itertools.count(1)


class Monitor:
    """Handshake events of one socket. Made, read and closed by the thread that has the socket at that time."""

    def __init__(self, context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", events: int) -> None:
        self._watched = socket
        address = f"inproc://handshakes-{next(_numbers)}"
        socket.monitor(address, events)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        # bounded, a monitor that nobody reads would block the thread that does the sending and receiving
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def read(self) -> tuple[int, int] | None:
        """The next (event, value), or None when there is none now."""
        try:
            message = parse_monitor_message(self.socket.recv_multipart(flags=zmq.NOBLOCK))
        except zmq.Again:
            return None
        return int(message["event"]), int(message["value"])

    def detach(self) -> None:
        """Stop the events; before the watched socket is closed."""
        self._watched.disable_monitor()

    def close(self) -> None:
        self.detach()
        self.socket.close()


class HandshakeWatch(Monitor):
    """A client's view of its one connection."""

    def __init__(
        self, context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", address: str, identity: str, keys: Keys | None
    ) -> None:
        super().__init__(context, socket, FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._who = f"{identity}: {address}"
        self._keys = keys
        self._failures, self._failing_since = 0, 0.0
        self._refusal = ""

    def check(self) -> None:
        """Raises KeyRefused, now and with every later call, once the server refuses this client."""
        while (seen := self.read()) is not None:
            self._note(*seen)
        if self._refusal:  # for good: ZeroMQ itself does not try again after most of these
            raise KeyRefused(f"{self._who} {self._refusal}", "closed")

    def _note(self, event: int, value: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._failures, self._refusal = 0, ""
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refusal = self._refused_key(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == MECHANISM_MISMATCH:
            self._refusal = self._other_mechanism()
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            log.warning("%s does not speak as expected during the handshake (code %#x) [corrupt]", self._who, value)
        elif self._keys is not None:
            self._closed(self._keys)

    def _refused_key(self, status: int) -> str:
        assert self._keys is not None  # only CURVE is asked for credentials
        public = self._keys.folder / CLIENTS / (self._keys.name + PUBLIC)
        return (
            f"refused the key of this node, {self._keys.name!r} of {self._keys.folder} (status {status}); the server"
            f" admits who is listed in {CLIENTS}/ of its own network.keys: {public.name} is not there, or is of other"
            " keys (python -m replay.keys)"
        )

    def _other_mechanism(self) -> str:
        if self._keys is None:
            return (
                "wants CURVE keys and this node has none; set network.keys to the folder that was made for this node"
                " (python -m replay.keys)"
            )
        return (
            f"speaks without CURVE and this node has the keys of {self._keys.folder}; set network.keys there as well,"
            " or on neither side"
        )

    def _closed(self, keys: Keys) -> None:
        """No reason was given: by a server of other keys, or by one without that closes before its greeting is read."""
        now = time.monotonic()
        if not self._failures:
            self._failing_since = now
        self._failures += 1
        if now - self._failing_since >= PATIENCE_S and self._failures >= MANY:
            self._refusal = (
                f"closed {self._failures} handshakes within {now - self._failing_since:.0f} s; its key is not"
                f" {keys.folder / (SERVER + PUBLIC)}: copy that file from the learner's node, or check the address;"
                " or it has no keys: set network.keys there"
            )
