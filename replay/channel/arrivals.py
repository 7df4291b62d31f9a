"""What a server checks before anybody sees a message: whose it is, whether it is whole, whether it came before."""

import contextlib
import os
import socket
import time
from collections.abc import Sequence

import zmq

from replay.channel.admission import Admission, NotAdmitted, identity_of
from replay.channel.frames import Envelope, Registry, WireError, decode
from replay.channel.roster import Roster, name_of

SMALL_BYTES = 8192
"""ZeroMQ cuts messages up to this size out of a shared receive buffer: they are copied, so that they are aligned and do
not keep that buffer."""
NO_RUN = ""
"""Run id of a peer that does not know the run yet."""


def contents(parts: Sequence[zmq.Frame]) -> list[bytes | memoryview]:
    """What received frames hold; large ones are read-only views without a copy."""
    return [part.buffer.toreadonly() if len(part) > SMALL_BYTES else part.bytes for part in parts]


class Arrivals:
    """The checks of one ROUTER, in order: size, identity, key, schema, run id, number."""

    def __init__(self, accepted: Registry, max_message_bytes: int, roster: Roster | None) -> None:
        """`roster` is the gate's; None without keys."""
        self._accepted = accepted
        self._max_message_bytes = max_message_bytes
        self._roster = roster
        self._admission = Admission()

    def take(self, parts: Sequence[zmq.Frame], run_id: str | None) -> tuple[str, Envelope | WireError]:
        """(identity, message) of received frames, the identity's first; what is wrong comes as its error.

        Args:
            parts: from recv_multipart(copy=False).
            run_id: a message must carry it, or none; None lets all pass.
        """
        identity = ""
        try:
            identity = identity_of(parts[0].bytes)
            return identity, self._checked(identity, parts, run_id)
        except WireError as error:
            return identity, error

    def may_have(self, identity: str) -> bool:
        """Whether a message may go to this identity: not when the key that it came with was removed since."""
        peer = self._admission.get(identity)
        return peer is None or self._roster is None or self._roster.admits(peer.user, time.monotonic())

    def _checked(self, identity: str, parts: Sequence[zmq.Frame], run_id: str | None) -> Envelope:
        size = sum(map(len, parts))
        if size > self._max_message_bytes:
            raise WireError(f"message of {size} bytes is above {self._max_message_bytes} (network.max_message_bytes)")
        try:
            peer = self._admission.bind(identity, self._user(parts[0]))
        except NotAdmitted:
            _cut(parts[0])  # or it would get what is meant for others
            raise
        envelope = decode(contents(parts[1:]), self._accepted, peer.sender)
        if run_id is not None and envelope.run_id not in (NO_RUN, run_id):
            raise WireError(f"run id {envelope.run_id!r}, this is {run_id!r}")
        peer.window.take(envelope.sequence)
        return envelope

    def _user(self, part: zmq.Frame) -> str:
        """User id of the connection that a frame came over. Raises NotAdmitted when its key was removed."""
        if self._roster is None:
            return ""
        user = str(part.get("User-Id"))
        if not self._roster.admits(user, time.monotonic()):
            raise NotAdmitted(f"the key {name_of(user)!r} was removed from {self._roster.folder}")
        return user


def _cut(part: zmq.Frame) -> None:
    """End the connection that a frame came over; when its peer connects again, the gate refuses it.

    ZeroMQ itself cannot close one connection of a socket. Its number may belong to another one by now: then that one
    ends, and its peer connects again.
    """
    number = part.get(zmq.MessageOption.SRCFD)
    with contextlib.suppress(OSError):  # it is closed already, or is no connection any more
        copy = socket.socket(fileno=os.dup(number))
        with copy:
            if copy.type == socket.SOCK_STREAM and _is_peer(copy, str(part.get("Peer-Address"))):
                copy.shutdown(socket.SHUT_RDWR)


def _is_peer(connection: socket.socket, address: str) -> bool:
    return str(connection.getpeername()[0]).removeprefix("::ffff:") == address.removeprefix("::ffff:")
