"""Staging in another process of this machine: the subscriber's end of it, and what both ends say.

The other process (a receiver) holds an `Intake`, so that a group's collectives run in the process whose engine decodes
meanwhile: two processes on one GPU would take turns. It connects to a local socket of this one:

| who        | says                                                                                      |
|------------|-------------------------------------------------------------------------------------------|
| receiver   | first: Hosting, the facts of its transport                                                |
| subscriber | Begin: receive this version                                                               |
| receiver   | Taken: where the bytes lie, or what of them is corrupt; or NotTaken: why it did not arrive |
| subscriber | Forget: drop the group and what is staged                                                 |
| receiver   | Done                                                                                      |
| subscriber | Close: drop the group and the connection to the publisher; no answer                      |
| receiver   | at any time: Over, why it ends                                                            |

It serves until the socket closes. One that hangs up, or does not answer in time, is lost for good.
"""

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from configs.infrastructure import WeightBus
from replay.channel import Message, Registry, WireError, registry
from weight_bus.errors import NotAvailable, TransportError
from weight_bus.intake import Load, Received
from weight_bus.local_line import Line
from weight_bus.manifest import Entry, Manifest, alignment_of
from weight_bus.messages import Begin, manifest_of
from weight_bus.transports.base import FORMING

log = logging.getLogger(__name__)

SEND_S = 5.0
"""For an order to be taken: the receiver reads whenever it waits for one."""
FORGET_S = 15.0
"""More than a transport takes to abort a broken group."""
SLACK_S = 30.0
"""Beside what the transport takes: a scheduler that computes holds the interpreter."""
VERIFIED_BYTES_PER_S = 50e6
"""Digests, and undoing a change, at the very least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting(Message):
    """The receiver is there. `facts` are what its transport must have in common with the publisher's."""

    facts: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(Message):
    """Every bucket has arrived, as `Intake.take` says it."""

    corrupt: list[str]
    seconds: dict[str, float]
    memory: list[Any] = field(default_factory=list)
    """Where each bucket lies, in words of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotTaken(Message):
    """The error of `Intake.take`: a TransportError, or a WireError where it has no symptom."""

    reason: str
    symptom: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget(Message):
    """As `Intake.forget`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(Message):
    """Forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close(Message):
    """As `Intake.close`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Over(Message):
    """The receiver ends."""

    reason: str
    for_good: bool = False
    """What it lacks (see `NotAvailable`) another one would lack, too."""


ORDERS = registry(Begin, Forget, Close)
HELLO = registry(Hosting, Over)
ANSWERS: dict[type[Message], Registry] = {Begin: registry(Taken, NotTaken, Over), Forget: registry(Done, Over)}


@dataclass(frozen=True, slots=True)
class RemoteUpdate:
    """An update that is staged elsewhere, proven."""

    entries: tuple[Entry, ...]
    """`bucket` and `offset` say where a tensor lies."""
    memory: list[Any]
    """See `Taken.memory`."""


RemoteLoad = Callable[[int, RemoteUpdate], Mapping[str, int]]
"""(version, update) -> digests of what the engine holds afterwards."""


class ReceiverLink:
    """The connection to one receiver. Used by one thread at a time, except `close`."""

    def __init__(self, line: Line, facts: Mapping[str, str]) -> None:
        self._line = line
        self.facts = dict(facts)
        self._lost: TransportError | None = None

    @classmethod
    def accept(cls, listener: socket.socket, limit_s: float) -> "ReceiverLink":
        """Wait for a receiver that connects and says what its transport is; `limit_s` for each.

        Raises:
            NotAvailable: it lacks what it would receive with.
            TransportError: none came, or it ended.
        """
        listener.settimeout(limit_s)
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise TransportError(f"the receiver in the engine did not connect in {limit_s:.1f} s", "silent") from error
        link = cls(Line(connection), {})
        hosting = link._answer(HELLO, limit_s, "nothing can be staged in the engine")
        assert isinstance(hosting, Hosting)
        link.facts = hosting.facts
        return link

    @property
    def lost(self) -> bool:
        """Whether there is nobody at the other end."""
        return self._lost is not None

    def ask(self, order: Message, run_id: str, limit_s: float, what: str) -> Message:
        """The answer to an order.

        Args:
            order: Begin or Forget.
            run_id: of the subscriber.
            limit_s: for the answer.
            what: for errors: what did not come about without it.

        Raises:
            TransportError: the receiver is lost, now or since an earlier order.
        """
        self.tell(order, run_id, what)
        return self._answer(ANSWERS[type(order)], limit_s, what)

    def tell(self, order: Message, run_id: str, what: str) -> None:
        """Give an order that has no answer. Raises TransportError as `ask`."""
        if self._lost is not None:
            raise self._lost.during(f"{what}, the receiver in the engine is lost")
        try:
            self._line.send(order, run_id, limit_s=SEND_S)
        except TimeoutError as error:
            raise self._give_up(f"{what}: the receiver in the engine reads no orders", "silent") from error
        except OSError as error:
            raise self._give_up(f"{what}: the receiver in the engine hung up ({error})", "closed") from error

    def close(self, reason: str = "closed by the rollout server") -> None:
        """Hang up, which ends the receiver; from any thread."""
        if self._lost is None:
            self._lost = TransportError(reason, "closed")
        self._line.close()

    def _answer(self, accepted: Registry, limit_s: float, what: str) -> Message:
        try:
            envelope = self._line.receive(accepted, limit_s)
        except TimeoutError as error:
            late = f"{what}: the receiver in the engine did not answer in {limit_s:.1f} s"
            raise self._give_up(late, "silent") from error
        except WireError as error:
            raise self._give_up(f"{what}: the receiver in the engine answered {error}", "corrupt") from error
        if envelope is None:
            raise self._give_up(f"{what}: the receiver in the engine hung up", "closed")
        if isinstance(envelope.message, Over):
            ended = self._give_up(f"{what}: the receiver in the engine ended: {envelope.message.reason}", "closed")
            raise NotAvailable(ended.message) if envelope.message.for_good else ended
        return envelope.message

    def _give_up(self, reason: str, symptom: str) -> TransportError:
        error = TransportError(reason, symptom)
        if self._lost is None:
            self._lost = error
        self._line.close()
        return error


class RemoteIntake(Received):
    """Has a receiver stage one version at a time; see `Intake`, whose place it takes.

    Args:
        connect: to the receiver; called once, by the thread that receives.
        config: the weight_bus section.
        run_id: of the subscriber.
        load: takes the place of the load callback, because there are no tensors here.
        slack_s: how late the receiver may be.
    """

    ranks = 1

    def __init__(
        self,
        connect: Callable[[], ReceiverLink],
        config: WeightBus,
        run_id: str,
        load: RemoteLoad,
        *,
        slack_s: float = SLACK_S,
    ) -> None:
        super().__init__()
        self._connect = connect
        self._link: ReceiverLink | None = None
        self._config = config
        self._run_id = run_id
        self._load = load
        self._slack_s = slack_s
        self._memory: list[Any] = []
        self.manifest = Manifest((), ())

    @property
    def facts(self) -> dict[str, str]:
        """See `Intake.facts`. Connects to the receiver."""
        return self._connected().facts

    def take(self, begin: Begin) -> list[str]:
        """See `Intake.take`; a receiver that is lost is a peer that is lost."""
        self.staged = None
        manifest = manifest_of(begin, alignment_of(self._config))
        what = f"v{begin.version} was not staged"
        answer = self._connected().ask(begin, self._run_id, self._limit_s(begin, manifest), what)
        if isinstance(answer, NotTaken):
            raise TransportError(answer.reason, answer.symptom) if answer.symptom else WireError(answer.reason)
        assert isinstance(answer, Taken)
        self.manifest, self._memory, self.seconds = manifest, answer.memory, answer.seconds
        if not answer.corrupt:
            self.staged = begin
        return answer.corrupt

    def apply(self, version: int, _: Load) -> Mapping[str, int]:
        """Have the engine load what is staged in it; digests of what it holds then."""
        return self._load(version, RemoteUpdate(self.manifest.entries, self._memory))

    def forget(self, *, resume: bool = True) -> None:
        """Drop the group and what is staged. A receiver that is lost is named by the next `take`."""
        self.staged = None
        if self._link is None or self._link.lost:
            return
        try:
            self._link.ask(Forget(), self._run_id, FORGET_S, "the group was not left")
        except TransportError as error:
            log.error("weight bus: %s", error)

    def close(self) -> None:
        """Tell the receiver to drop the group; nobody waits for it. It goes on, for a later subscriber."""
        if self._link is None or self._link.lost:
            return
        try:
            self._link.tell(Close(), self._run_id, "the group was not closed")
        except TransportError as error:
            log.error("weight bus: %s", error)

    def _connected(self) -> ReceiverLink:
        if self._link is None:
            self._link = self._connect()
        return self._link

    def _limit_s(self, begin: Begin, manifest: Manifest) -> float:
        """The transport's own limits bound every broadcast; this bounds a receiver that stands still."""
        coming = -(-begin.wire_bytes // begin.bucket_bytes) if begin.base else len(manifest.bucket_sizes)
        collectives = (FORMING + coming) * self._config.collective_timeout_s
        return collectives + manifest.num_bytes / VERIFIED_BYTES_PER_S + self._slack_s
