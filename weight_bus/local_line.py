"""Messages between two processes of one machine, over a connected Unix socket: each with its length before it."""

import socket
import struct
import time
from pathlib import Path

from replay.channel import Envelope, Message, Registry, WireError, decode, encode, sequence_numbers

LENGTH = struct.Struct("<Q")
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
READ_BYTES = 1 << 20


class Line:
    """One end. Used by one thread at a time, except `close`, which ends what another thread waits for."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sequence = sequence_numbers()

    @classmethod
    def to(cls, path: Path, limit_s: float) -> "Line":
        """Connect to who listens there. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(limit_s)
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        return cls(connection)

    def send(self, message: Message, run_id: str = "", *, limit_s: float) -> None:
        """Write a message, which has no arrays.

        Raises:
            TimeoutError: the other end does not read.
            OSError: it has hung up.
        """
        (body,) = encode(message, run_id, next(self._sequence))
        self._socket.settimeout(limit_s)
        self._socket.sendall(LENGTH.pack(len(body)) + body)

    def receive(self, accepted: Registry, limit_s: float | None) -> Envelope | None:
        """The next message; None when the other end has hung up.

        Args:
            accepted: kinds that may come.
            limit_s: for the whole message; None waits without end.

        Raises:
            TimeoutError: it did not come in time.
            WireError: what came cannot be used.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        try:
            head = self._read(LENGTH.size, until)
            if len(head) < LENGTH.size:
                return None
            (size,) = LENGTH.unpack(head)
            if size > MAX_MESSAGE_BYTES:
                raise WireError(f"a message of {size} bytes is announced, above {MAX_MESSAGE_BYTES}")
            body = self._read(size, until)
        except TimeoutError:
            raise
        except OSError:  # reset, or closed by another thread of this end
            return None
        return decode([bytes(body)], accepted) if len(body) == size else None

    def _read(self, size: int, until: float | None) -> bytearray:
        """So many bytes, fewer at the end of the stream."""
        found = bytearray()
        while len(found) < size:
            self._socket.settimeout(None if until is None else max(1e-3, until - time.monotonic()))
            part = self._socket.recv(min(size - len(found), READ_BYTES))
            if not part:
                break
            found += part
        return found

    def close(self) -> None:
        """Hang up; may be said again."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
        except OSError:
            pass  # the other end was first
        finally:
            self._socket.close()
