"""Faults between a publisher and a subscriber: of messages of the control plane, and of changes on the data plane.

Messages, by a proxy:

    dropped     it never comes
    repeated    it comes twice, one after the other
    late copy   it comes, and once more behind up to three other messages
    reordered   it comes after its successor
    other base  a Begin of a change names a base that is not the one that it was made from

Changes are taken from the wire whole, so that the group stays in step, and altered before the subscriber reads them:

    again       the change that came last, in place of this one
    stale       any earlier change, one of the same size where there is one
    twice       one piece comes twice, and all behind it are one late
    swapped     two pieces have changed places
"""

import dataclasses
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from replay.channel import Envelope, decode, encode
from scripts.chaos.probe import Wrapped
from scripts.chaos.proxy import Direction, Intercept, Link, ZmtpMessage
from weight_bus.manifest import Entry
from weight_bus.messages import TO_SUBSCRIBER, Begin
from weight_bus.transports import Transport
from weight_bus.transports.base import ignore

MESSAGES: dict[Direction, tuple[str, ...]] = {
    "up": ("Staged", "Applied", "EpochReady", "Join", "Heartbeat", "ReceiveFailed"),
    "down": ("Begin", "Commit", "Epoch", "Abort", "Welcome", "Removed", "Heartbeat"),
}
DEEDS = ("dropped", "repeated", "late copy", "reordered")
BEHIND = AHEAD = 3
"""A late copy comes behind up to so many others; a fault waits for up to so many messages of its kind to pass first."""
DATA_KINDS = ("again", "stale", "twice", "swapped")
HISTORY = 40


def after(left: int, kind: str = "") -> Callable[[ZmtpMessage], bool]:
    """Wants the n-th message, from 0 on, of a kind, or of all but heartbeats, which have a pace of their own."""
    numbers = itertools.count()

    def wanted(message: ZmtpMessage) -> bool:
        counts = message.kind == kind if kind else message.kind != "Heartbeat"
        return counts and next(numbers) >= left

    return wanted


class ControlFaults:
    """Faults on the links of all subscribers, and what came of them."""

    def __init__(self, seed: int, links: dict[str, Link]) -> None:
        self._rng, self._links = random.Random(seed), links
        self._armed: dict[tuple[str, Direction, str], Intercept] = {}
        self.done: dict[str, Counter[str]] = {deed: Counter() for deed in DEEDS}  # by kind of message
        self._bases: list[str] = []  # digests that changes were made from
        self.rebased: list[tuple[str, int]] = []  # (subscriber, version) of changes that were given another base

    def plan(self, name: str) -> None:
        """One fault more on a link; none where one of its kind is waiting already."""
        direction: Direction = self._rng.choice(("up", "down"))
        kind, deed = self._rng.choice(MESSAGES[direction]), self._rng.choice(DEEDS)
        if deed == "late copy" and kind == "Heartbeat":
            deed = "repeated"

        def change(message: ZmtpMessage) -> list[bytes]:
            self.done[deed][message.kind] += 1
            whole = message.wire()
            if deed == "late copy":
                again = Intercept(after(self._rng.randrange(BEHIND)), lambda other: [other.wire(), whole])
                self._links[name].intercepts[direction].append(again)
            return {"dropped": [], "repeated": [whole, whole]}.get(deed, [whole])

        wanted = after(self._rng.randrange(AHEAD), kind)
        self._arm(name, direction, kind, Intercept(wanted, change, hold_for_next=deed == "reordered"))

    def plan_other_base(self, name: str) -> None:
        """The next change that is begun names a base that some version before had."""
        self._arm(name, "down", "change", Intercept(self._is_change, lambda message: [self._rebased(name, message)]))

    def clear(self) -> None:
        """Let everything pass from now on."""
        for link in self._links.values():
            for intercepts in link.intercepts.values():
                intercepts.clear()

    def _arm(self, name: str, direction: Direction, kind: str, intercept: Intercept) -> None:
        waiting = self._armed.get((name, direction, kind))
        if waiting is None or waiting.kind:
            self._armed[name, direction, kind] = intercept
            self._links[name].intercepts[direction].append(intercept)

    def _is_change(self, message: ZmtpMessage) -> bool:
        begin = _envelope(message).message if message.kind == "Begin" else None
        if not isinstance(begin, Begin) or not begin.base:
            return False
        self._bases.append(begin.base)
        return len(set(self._bases)) > 1

    def _rebased(self, name: str, message: ZmtpMessage) -> bytes:
        envelope = _envelope(message)
        begin = envelope.message
        assert isinstance(begin, Begin)
        base = self._rng.choice([other for other in self._bases if other != begin.base])
        self.rebased.append((name, begin.version))
        header = encode(dataclasses.replace(begin, base=base), envelope.run_id, envelope.sequence)[0]
        return ZmtpMessage((dataclasses.replace(message.frames[0], body=bytes(header)),)).wire()


def _envelope(message: ZmtpMessage) -> Envelope:
    return decode([frame.body for frame in message.frames], TO_SUBSCRIBER)


class DataFaults:
    """What is to happen to the next change at each subscriber, and what has happened."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.due: dict[str, str] = {}  # kind by subscriber
        self.lock = threading.Lock()
        self.planted: list[tuple[str, int, str]] = []
        """(subscriber, version, kind), only where other bytes were given than had come."""

    def plan(self, name: str, kind: str = "") -> None:
        """One fault for this subscriber's next change that it fits; without a kind, any."""
        self.due[name] = kind or self._rng.choice(DATA_KINDS)

    def given(self, kind: str, real: torch.Tensor, piece: int, history: list[torch.Tensor]) -> torch.Tensor:
        """What to give instead; the real one where the fault does not fit."""
        if kind in ("twice", "swapped") and real.numel() > piece:
            first, rest = real[:piece], real[piece:]
            order = [first, first, rest] if kind == "twice" else [rest[:piece], first, rest[piece:]]
            return torch.cat(order)[: real.numel()]
        if kind in ("again", "stale") and history:
            fitting = [one for one in history if one.numel() == real.numel() and not torch.equal(one, real)]
            found = history[-1] if kind == "again" else self._rng.choice(fitting or history)
            return torch.cat([found, real[found.numel() :]])[: real.numel()]
        return real


class AlteredTransport(Wrapped):
    """A subscriber's transport; `label` says which version comes, and whether as a change."""

    def __init__(self, inner: Transport, faults: DataFaults, name: str) -> None:
        super().__init__(inner)
        self._faults, self._name, self._version, self._is_change = faults, name, -1, False
        self._pieces: list[torch.Tensor] = []
        self._history: list[torch.Tensor] = []

    def label(self, version: int, entries: Sequence[Sequence[Entry]] | None) -> None:
        self._version, self._is_change, self._pieces = version, entries is None, []
        super().label(version, entries)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        self.inner.broadcast(bucket, index)
        self._pieces.append(bucket)

    def finish(self, arrived: Callable[[int], Any] = ignore) -> None:
        """Do what is due to a change that has come, in place."""
        self.inner.finish(arrived)
        if not self._is_change:
            return
        faults, real = self._faults, torch.cat(self._pieces)
        with faults.lock:
            kind = faults.due.get(self._name, "")
            given = faults.given(kind, real, self._pieces[0].numel(), self._history)
            if not torch.equal(given, real):
                faults.due.pop(self._name, None)
                faults.planted.append((self._name, self._version, kind))
                for piece, part in zip(self._pieces, given.split([p.numel() for p in self._pieces]), strict=True):
                    piece.copy_(part)
        self._history = [*self._history, real][-HISTORY:]
