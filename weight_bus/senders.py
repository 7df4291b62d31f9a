"""The senders on other learner ranks, as the publisher's bus thread orders them to send their lanes."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from weight_bus.control import Router
from weight_bus.errors import NotPacked, SenderBroken, TransportError, WeightBusError
from weight_bus.lanes import Lane
from weight_bus.messages import Enlist, Goodbye, Send, Sent
from weight_bus.transports.base import differing

log = logging.getLogger(__name__)

OWN = {kind.code: kind for kind in (NotPacked, SenderBroken)}
"""Errors of a sender that are no receiver's fault."""


class Endpoints(Protocol):
    """See `Sender.endpoints`."""

    def __call__(self, *, beside: bool) -> list[str]: ...


@dataclass(slots=True)
class _Ordered:
    """What a rank is to send, and since when it may not have heard of it."""

    order: Send
    future: "Future[None]" = field(default_factory=Future)
    heard_at: float = field(default_factory=time.monotonic)


class Senders:
    """Used by the bus thread alone.

    Args:
        lanes: of all ranks; those of rank 0 are not sent from here.
        session: which only learner ranks know.
        facts: what a sender's transport must have in common with the publisher's.
        endpoints: of rank 0's own lanes, by `beside`.
        patience_s: for which a rank may be without a connection.
    """

    def __init__(
        self,
        router: Router,
        lanes: Sequence[Lane],
        session: str,
        facts: dict[str, str],
        endpoints: Endpoints,
        patience_s: float,
    ) -> None:
        self._router, self._lanes, self.session, self._facts = router, lanes, session, facts
        self._own, self._patience_s = endpoints, patience_s
        self.ranks = sorted({lane.sender for lane in lanes} - {0})
        self._enlisted: dict[int, tuple[str, Enlist]] = {}
        """By rank: the identity of its connection, and what it said."""
        self._ordered: dict[int, _Ordered] = {}
        self._orders = 0

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
                self._sent(message)

    def send(self, rank: int, order: Send) -> "Future[None]":
        """Have a rank send its lanes. The future raises TransportError, or WeightBusError: the rank is gone."""
        self._orders += 1
        self._ordered[rank] = _Ordered(replace(order, number=self._orders))
        self.remind(time.monotonic())
        return self._ordered[rank].future

    def remind(self, now: float) -> None:
        """Say again what is not done: an order may be lost with its connection."""
        for rank, ordered in self._ordered.items():
            if ordered.future.done():
                continue
            symptom = self._router.send(self._enlisted[rank][0], ordered.order)
            ordered.heard_at = now if not symptom else ordered.heard_at
            if (away_s := now - ordered.heard_at) > self._patience_s:
                said = f"the bus cannot reach learner rank {rank} for {away_s:.1f} s [{symptom}]"
                ordered.future.set_exception(WeightBusError(said))

    def say_goodbye(self, reason: str) -> None:
        for identity, _ in self._enlisted.values():
            self._router.send(identity, Goodbye(session=self.session, reason=reason))

    def _sent(self, sent: Sent) -> None:
        for rank, ordered in self._ordered.items():
            if ordered.order.number == sent.number and not ordered.future.done():
                identity, enlisted = self._enlisted[rank]
                self._enlisted[rank] = identity, replace(enlisted, endpoints=sent.endpoints)
                if sent.reason:
                    said = f"learner rank {rank}: {sent.reason}" if sent.code == SenderBroken.code else sent.reason
                    ordered.future.set_exception(OWN.get(sent.code, TransportError)(said, sent.symptom))
                else:
                    ordered.future.set_result(None)
