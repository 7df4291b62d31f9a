"""The line between a rollout server and a receiver in another process of this machine, and what is said on it.

The receiver (in a scheduler of the engine) holds an `Intake`, so that a group's collectives run in the process that
decodes meanwhile: two processes on one GPU would take turns. It connects to a Unix socket of the server:

| sender   | message                                                                                   |
|----------|-------------------------------------------------------------------------------------------|
| receiver | first: Hosting, the facts of its transport                                                |
| server   | Begin: receive this version                                                               |
| receiver | Taken: where the bytes lie, or what of them is corrupt; or NotTaken: why it did not arrive |
| server   | Forget: drop the group and what is staged                                                 |
| receiver | Done                                                                                      |
| receiver | at any time: Over, why it ends                                                            |

Each message is a header of replay.channel behind its length. It goes on until one end hangs up. An end that does not
answer in time is lost for good.
"""

import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replay.channel import Envelope, Message, Registry, WireError, decode, encode, registry, sequence_numbers
from weight_bus.errors import NotAvailable, TransportError
from weight_bus.messages import Begin

LENGTH = struct.Struct("<Q")
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
READ_BYTES = 1 << 20
RECEIVER = "the receiver in the engine"
SEND_S = 5.0
"""For a message to be taken: either end reads whenever it waits for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting(Message):
    """The receiver is ready. `facts` are what its transport must have in common with the publisher's."""

    facts: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Message):
    """Every bucket has arrived: the result of `Intake.take`."""

    corrupt: list[str]
    seconds: dict[str, float]
    memory: list[Any] = field(default_factory=list)
    """Where each bucket lies, in terms of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotTaken(Message):
    """The error of `Intake.take`: a TransportError, or a WireError where it has no symptom."""

    reason: str
    symptom: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget(Message):
    """See `Intake.forget`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Message):
    """Forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over(Message):
    """The receiver ends."""

    reason: str
    for_good: bool = False
    """What it lacks (see `NotAvailable`) its successor would lack, too."""


ORDERS = registry(Begin, Forget)
HELLO = registry(Hosting, Over)
ANSWERS: dict[type[Message], Registry] = {Begin: registry(Taken, NotTaken, Over), Forget: registry(Done, Over)}


class Line:
    """One end. Used by one thread at a time, except `close`, which wakes a thread that waits."""

    def __init__(self, connection: socket.socket, peer: str = RECEIVER) -> None:
        self._socket, self._peer = connection, peer
        self.facts: dict[str, str] = {}
        """Of a receiver's transport."""
        self._sequence = sequence_numbers()
        self._lost: TransportError | None = None

    @classmethod
    def connect(cls, path: Path) -> "Line":
        """To the rollout server, which listens at `path`. Raises TransportError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(SEND_S)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            raise TransportError(f"the rollout server does not listen at {path}: {error}", "closed") from error
        return cls(connection, "the rollout server")

    @classmethod
    def accept(cls, listener: socket.socket, limit_s: float) -> "Line":
        """From a receiver that connects and says what its transport is; `limit_s` for each.

        Raises:
            NotAvailable: it lacks what it would receive with.
            TransportError: none came, or it ended.
        """
        listener.settimeout(limit_s)
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise TransportError(f"{RECEIVER} did not connect in {limit_s:.1f} s", "silent") from error
        line = cls(connection, RECEIVER)
        hosting = line._answer(HELLO, limit_s, "nothing can be staged in the engine")
        assert isinstance(hosting, Hosting)
        line.facts = hosting.facts
        return line

    @property
    def lost(self) -> bool:
        """Whether the other end cannot be reached any more."""
        return self._lost is not None

    def send(self, message: Message, run_id: str = "") -> None:
        """Write a message, which has no arrays. Raises TransportError when the other end is lost, now or before."""
        if self._lost is not None:
            raise self._lost
        (body,) = encode(message, run_id, next(self._sequence))
        self._socket.settimeout(SEND_S)
        try:
            self._socket.sendall(LENGTH.pack(len(body)) + body)
        except TimeoutError as error:
            raise self._lose(f"{self._peer} reads nothing for {SEND_S:.1f} s", "silent") from error
        except OSError as error:
            raise self._lose(f"{self._peer} hung up ({error})", "closed") from error

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
            (size,) = LENGTH.unpack(self._read(LENGTH.size, until))
            if size > MAX_MESSAGE_BYTES:
                raise WireError(f"a message of {size} bytes is announced, above {MAX_MESSAGE_BYTES}")
            return decode([self._read(size, until)], accepted)
        except TimeoutError:
            raise
        except (OSError, EOFError):  # OSError: reset, or closed by another thread of this end
            return None

    def ask(self, order: Message, run_id: str, limit_s: float, what: str) -> Message:
        """The answer of the receiver to an order; `what`, for errors, does not come about without it.

        Raises:
            TransportError: the receiver is lost, now or since an earlier order.
        """
        if self._lost is not None:
            raise self._lost.during(f"{what}, {self._peer} is lost")
        try:
            self.send(order, run_id)
        except TransportError as error:
            raise error.during(what) from error
        return self._answer(ANSWERS[type(order)], limit_s, what)

    def _answer(self, accepted: Registry, limit_s: float, what: str) -> Message:
        try:
            envelope = self.receive(accepted, limit_s)
        except TimeoutError as error:
            raise self._lose(f"{self._peer} did not answer in {limit_s:.1f} s", "silent").during(what) from error
        except WireError as error:
            raise self._lose(f"{self._peer} answered {error}", "corrupt").during(what) from error
        if envelope is None:
            raise self._lose(f"{self._peer} hung up", "closed").during(what)
        over = envelope.message
        if isinstance(over, Over):
            ended = self._lose(f"{self._peer} ended: {over.reason}", "closed").during(what)
            raise NotAvailable(ended.message) if over.for_good else ended
        return envelope.message

    def close(self) -> None:
        """Hang up; has no effect a second time."""
        self._lose("closed by this end", "closed")

    def _read(self, size: int, until: float | None) -> bytes:
        """Exactly `size` bytes. Raises EOFError where the stream ends before."""
        found = bytearray()
        while len(found) < size:
            self._socket.settimeout(None if until is None else max(1e-3, until - time.monotonic()))
            part = self._socket.recv(min(size - len(found), READ_BYTES))
            if not part:
                raise EOFError
            found += part
        return bytes(found)

    def _lose(self, reason: str, symptom: str) -> TransportError:
        """Close this end; the error says why, and the first one is kept for later calls."""
        error = TransportError(reason, symptom)
        if self._lost is None:
            self._lost = error
            with suppress(OSError):  # the other end was first
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
            self._socket.close()
        return error
