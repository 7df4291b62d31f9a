"""Staging in another process of this machine: the subscriber's end, and the line between both.

The receiver (in a scheduler of the engine) holds an `Intake`, so that a group's collectives run in the process that
decodes meanwhile: two processes on one GPU would take turns. It connects to a Unix socket of the server:

| sender   | message                                                                                    |
|----------|--------------------------------------------------------------------------------------------|
| receiver | first: Hosting, the facts of its transport; at any time: Over, why it ends                 |
| server   | NewLayout: what versions carry from now on; without an answer                              |
| server   | Begin: receive this version (of several lanes one each)                                    |
| receiver | Taken: where the bytes lie, or what of them is corrupt; or NotTaken: why it did not arrive |
| server   | Forget: drop the group and what is staged                                                  |
| receiver | Done                                                                                       |

Each message is the number of its frames (replay.channel), and each frame behind its length. It goes on until one end
hangs up. An end that does not answer in time is lost for good.
"""

import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.infrastructure import WeightBus
from replay.channel import Envelope, Message, Registry, WireError, decode, encode, registry, sequence_numbers
from replay.channel.frames import MAX_ARRAYS
from weight_bus.errors import NotAvailable, TransportError
from weight_bus.intake import Layouts, Load
from weight_bus.manifest import NOTHING, Entry, alignment_of
from weight_bus.messages import Begin, NewLayout
from weight_bus.transports.base import FORMING

LENGTH = struct.Struct("<Q")
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
READ_BYTES = 1 << 20
RECEIVER = "the receiver in the engine"
SEND_S = 5.0  # for a message to be taken: either end reads whenever it waits for one
FORGET_S = 15.0  # more than a transport takes to abort a broken group
SLACK_S = 30.0  # beside what the transport takes: a scheduler that computes holds the interpreter
VERIFIED_BYTES_PER_S = 50e6  # digests, and undoing a change, at the very least


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting(Message):
    """The receiver is ready. `facts` are what its transport must have in common with the publisher's."""

    facts: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Message):
    """Every bucket has arrived: the result of `Intake.take`."""

    corrupt: list[str]
    seconds: dict[str, float]
    memory: list[Any] = field(default_factory=list)  # where each bucket lies, in terms of the engine


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
    for_good: bool = False  # what it lacks (see `NotAvailable`) its successor would lack, too


ORDERS = registry(NewLayout, Begin, Forget)
HELLO = registry(Hosting, Over)
ANSWERS: dict[type[Message], Registry] = {Begin: registry(Taken, NotTaken, Over), Forget: registry(Done, Over)}


class ReceiverConnection:
    """One end. Used by one thread at a time, except `close`, which wakes a thread that waits."""

    def __init__(self, connection: socket.socket, peer: str = RECEIVER) -> None:
        self._socket, self._peer = connection, peer
        self.facts: dict[str, str] = {}  # of a receiver's transport
        self._sequence = sequence_numbers()
        self._lost: TransportError | None = None

    @classmethod
    def connect(cls, path: Path) -> "ReceiverConnection":
        """To the rollout server, which listens at `path`. Raises TransportError."""
        line = cls(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "the rollout server")
        line._socket.settimeout(SEND_S)
        try:
            line._socket.connect(str(path))
        except OSError as error:
            raise line._lose(f"the rollout server does not listen at {path}: {error}", "closed") from error
        return line

    @classmethod
    def accept(cls, listener: socket.socket, limit_s: float) -> "ReceiverConnection":
        """From a receiver that connects and says what its transport is; `limit_s` for each.

        Raises TransportError: none came, or it ended; NotAvailable: it lacks what it would receive with.
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
        """Write a message. Raises TransportError when the other end is lost, now or before."""
        if self._lost is not None:
            raise self._lost
        frames = encode(message, run_id, next(self._sequence))
        parts = [LENGTH.pack(len(frames)), *(part for frame in frames for part in (LENGTH.pack(len(frame)), frame))]
        self._socket.settimeout(SEND_S)
        try:
            self._socket.sendall(b"".join(parts))
        except TimeoutError as error:
            raise self._lose(f"{self._peer} reads nothing for {SEND_S:.1f} s", "silent") from error
        except OSError as error:
            raise self._lose(f"{self._peer} hung up ({error})", "closed") from error

    def receive(self, accepted: Registry, limit_s: float | None) -> Envelope | None:
        """The next message, of the accepted kinds, within `limit_s` (None: without end); None when the other hung up.

        Raises TimeoutError: it did not come in time; WireError: what came cannot be used.
        """
        until = None if limit_s is None else time.monotonic() + limit_s
        try:
            count = self._length(until, MAX_ARRAYS + 1)
            return decode([self._read(self._length(until), until) for _ in range(count)], accepted)
        except TimeoutError:
            raise
        except (OSError, EOFError):  # OSError: reset, or closed by another thread of this end
            return None

    def ask(self, order: Message, run_id: str, limit_s: float, what: str) -> Message:
        """The answer of the receiver to an order; `what`, for errors, does not come about without it.

        Raises TransportError: the receiver is lost, now or since an earlier order.
        """
        self.tell(order, run_id, what)
        return self.answer(type(order), limit_s, what)

    def answer(self, order: type[Message], limit_s: float, what: str) -> Message:
        """To what it was told; as `ask`."""
        return self._answer(ANSWERS[order], limit_s, what)

    def tell(self, order: Message, run_id: str, what: str) -> None:
        """An order without an answer; as `ask`."""
        if self._lost is not None:
            raise self._lost.during(f"{what}, {self._peer} is lost")
        try:
            self.send(order, run_id)
        except TransportError as error:
            raise error.during(what) from error

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

    def _length(self, until: float | None, limit: int = MAX_MESSAGE_BYTES) -> int:
        (length,) = LENGTH.unpack(self._read(LENGTH.size, until))
        if length > limit:
            raise WireError(f"a message of {length} bytes or frames is announced, above {limit}")
        return int(length)

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


@dataclass(frozen=True, slots=True)
class RemoteUpdate:
    """An update that is staged elsewhere, proven."""

    entries: tuple[Entry, ...]  # `bucket` and `offset` say where a tensor lies
    memory: list[Any]  # see `Taken.memory`
    slices: "tuple[RemoteUpdate, ...]" = ()
    """What each scheduler rank has staged for itself; then the rest is empty."""


RemoteLoad = Callable[[int, RemoteUpdate], Mapping[str, int]]
"""(version, update) -> digests of what the engine holds afterwards."""


class RemoteIntake:
    """Has receivers stage one version at a time; see `Intake`, whose place it takes.

    Args:
        connect: the lines to the receivers, by scheduler rank; called once, by the thread that receives.
        load: takes the place of the load callback, because there are no tensors here.
        slack_s: how late the receiver may be.
    """

    def __init__(
        self,
        connect: Callable[[], Sequence[ReceiverConnection]],
        config: WeightBus,
        run_id: str,
        load: RemoteLoad,
        *,
        slack_s: float = SLACK_S,
    ) -> None:
        self._connect, self._config, self._run_id, self._load = connect, config, run_id, load
        self._slack_s = slack_s
        self._lines: Sequence[ReceiverConnection] = ()
        self._update = RemoteUpdate((), [])
        self.seconds: dict[str, float] = {}
        self.manifest = NOTHING
        self._layouts = Layouts()
        self._untold: dict[int, NewLayout] = {}
        """By lane: what the receivers have not been told of yet."""

    @property
    def facts(self) -> dict[str, str]:
        """See `Intake.facts`. Connects to the receivers."""
        return self._connected()[0].facts

    def learn(self, new: NewLayout) -> None:
        """See `Intake.learn`."""
        self._layouts.learn(new, alignment_of(self._config))
        self._untold[new.lane] = new

    def take(self, *begins: Begin) -> list[str]:
        """See `Intake.take`; a receiver that is lost is a peer that is lost."""
        begin, (lanes, self.manifest) = begins[0], self._layouts.read(begins)
        lines, positions = self._connected(), sorted({one.position for one in begins})
        if positions != [*range(len(lines))] and positions != [0]:
            raise WireError(f"v{begin.version} is for scheduler ranks {positions}, this engine has {len(lines)}")
        # the transport's own limits bound every broadcast; this bounds a receiver that stands still
        buckets, size = sum(len(lane.layout.bucket_sizes) for lane in lanes), sum(m.layout.num_bytes for m in lanes)
        pieces = -(-begin.wire_bytes // begin.bucket_bytes) if begin.base else buckets
        limit_s = (FORMING * len(begins) + pieces) * self._config.collective_timeout_s + self._slack_s
        limit_s += size / VERIFIED_BYTES_PER_S
        parts = [[n for n, one in enumerate(begins) if one.position == position] for position in positions]
        news = [[self._untold[begins[n].lane] for n in part if begins[n].lane in self._untold] for part in parts]
        orders = [[*new, *(begins[n] for n in part)] for new, part in zip(news, parts, strict=True)]
        self._untold = {}
        what = f"v{begin.version} was not staged"
        answers = ask_all(list(zip(lines, orders, strict=False)), self._run_id, limit_s, what)
        corrupt: list[str] = []
        updates: list[RemoteUpdate] = []
        for position, (answer, part) in enumerate(zip(answers, parts, strict=True)):
            where = f"scheduler rank {position}: " if len(answers) > 1 else ""
            if isinstance(answer, NotTaken):
                reason = f"{where}{answer.reason}"
                raise TransportError(reason, answer.symptom) if answer.symptom else WireError(reason)
            assert isinstance(answer, Taken)
            corrupt += [f"{where}{name}" for name in answer.corrupt]
            layout = self._layouts.joined(position, [lanes[n].layout for n in part]).layout
            updates.append(RemoteUpdate(layout.entries, answer.memory))
            before = self.seconds if position else {}
            self.seconds = {phase: max(s, before.get(phase, 0.0)) for phase, s in answer.seconds.items()}
        self._update = updates[0] if len(updates) == 1 else RemoteUpdate((), [], tuple(updates))
        return corrupt

    def apply(self, version: int, _: Load) -> Mapping[str, int]:
        """Have the engine load what is staged in it; digests of what it holds then."""
        return self._load(version, self._update)

    def forget(self) -> None:
        """Drop the groups and what is staged. A receiver that is lost is named by the next `take`."""
        for line in self._lines:
            if not line.lost:
                with suppress(TransportError):
                    line.ask(Forget(), self._run_id, FORGET_S, "the group was not left")

    def close(self) -> None:
        """Drop the group. The receiver stays, for a later subscriber."""
        self.forget()

    def _connected(self) -> Sequence[ReceiverConnection]:
        if not self._lines:
            self._lines = self._connect()
        return self._lines


def ask_all(
    orders: Sequence[tuple[ReceiverConnection, Sequence[Message]]], run_id: str, limit_s: float, what: str
) -> list[Message]:
    """The answer of each receiver to its Begins. Raises the first error, once all have answered."""
    answers: list[Message] = []
    errors: list[TransportError | NotAvailable] = []
    asked: list[ReceiverConnection] = []
    until = time.monotonic() + limit_s
    for line, messages in orders:
        try:
            for message in messages:
                line.tell(message, run_id, what)
            asked.append(line)
        except TransportError as error:
            errors.append(error)
    for line in asked:  # also where others are lost: an answer that nobody reads would be taken for the next one
        try:
            answers.append(line.answer(Begin, max(0.0, until - time.monotonic()), what))
        except (TransportError, NotAvailable) as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return answers
