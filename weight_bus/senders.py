"""The senders on other learner ranks, as the publisher's bus thread orders them to send their lanes."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from weight_bus.control import Router
from weight_bus.errors import NotPacked, TransportError, WeightBusError
from weight_bus.lanes import Lane
from weight_bus.messages import Enlist, Goodbye, Send, Sent
from weight_bus.transports.base import differing

log = logging.getLogger(__name__)


class Endpoints(Protocol):
    """See `Sender.endpoints`."""

    def __call__(self, *, beside: bool) -> list[str]: ...


class Senders:
    """Used by the bus thread alone.

    Args:
        lanes: of all ranks; those of rank 0 are not sent from here.
        session: which only learner ranks know.
        facts: what a sender's transport must have in common with the publisher's.
        endpoints: of rank 0's own lanes, by `beside`.
    """

    def __init__(
        self, router: Router, lanes: Sequence[Lane], session: str, facts: dict[str, str], endpoints: Endpoints
    ) -> None:
        self._router, self._lanes, self.session, self._facts = router, lanes, session, facts
        self._own = endpoints
        self.ranks = sorted({lane.sender for lane in lanes} - {0})
        self._enlisted: dict[int, tuple[str, Enlist]] = {}
        """By rank: the identity of its connection, and what it said."""
        self._ordered: dict[int, tuple[Send, Future[None]]] = {}

    @property
    def missing(self) -> list[int]:
        """Ranks that are not there yet."""
        return [rank for rank in self.ranks if rank not in self._enlisted]

    def of_lane(self, number: int, beside: bool) -> dict[str, Any]:
        """The fields of Begin that say which lane it is, and where its members meet."""
        if not self._lanes:
            return {"endpoint": self._own(beside=beside)[0]}
        lane = self._lanes[number]
        own = [other.number for other in self._lanes if other.sender == lane.sender]
        if lane.sender:
            endpoints = self._enlisted[lane.sender][1].endpoints[len(own) * beside :]
        else:
            endpoints = self._own(beside=beside)
        nth = own.index(number)
        here = sum(other.position == lane.position for other in self._lanes)
        its = {"lane": number, "lanes": len(self._lanes), "here": here, "position": lane.position}
        return {**its, "sender": lane.sender, "endpoint": endpoints[nth]}

    def hear(self, identity: str, message: Enlist | Sent) -> None:
        """Take note. Raises WeightBusError: a learner rank cannot be in a group with the engines."""
        if message.session != self.session:
            log.warning("weight bus: refused %s: not of this learner's ranks", type(message).__name__)
            return
        match message:
            case Enlist():
                if apart := differing(self._facts, message.facts):
                    raise WeightBusError(f"learner rank {message.rank} differs from rank 0: {apart}")
                self._enlisted[message.rank] = (identity, message)
            case Sent():
                self._sent(identity, message)

    def send(self, rank: int, order: Send) -> "Future[None]":
        """Have a rank send its lanes. The future raises TransportError."""
        future: Future[None] = Future()
        identity, _ = self._enlisted[rank]
        self._ordered[rank] = (order, future)
        if symptom := self._router.send(identity, order):
            future.set_exception(WeightBusError(f"learner rank {rank} cannot be reached by the bus [{symptom}]"))
        return future

    def say_goodbye(self, reason: str) -> None:
        for identity, _ in self._enlisted.values():
            self._router.send(identity, Goodbye(session=self.session, reason=reason))

    def _sent(self, identity: str, sent: Sent) -> None:
        for rank, (order, future) in self._ordered.items():
            its, _ = self._enlisted[rank]
            if its == identity and (order.epoch, order.version) == (sent.epoch, sent.version) and not future.done():
                if sent.reason:
                    kind = NotPacked if sent.not_packed else TransportError
                    future.set_exception(kind(sent.reason, sent.symptom))
                else:
                    future.set_result(None)
