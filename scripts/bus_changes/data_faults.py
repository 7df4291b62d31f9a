"""The data plane of a subscriber, on which changes are stale, come again, or have their pieces in disorder.

All of a change is taken from the wire first, so that the group stays in step, and altered before the subscriber reads:

    again     the change that came last, in place of this one
    stale     any earlier change, one of the same size where there is one
    twice     one piece comes twice, and all behind it are one late
    swapped   two pieces have changed places
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from configs.infrastructure import WeightBus
from scripts.bus_changes.witness import HOST
from weight_bus.manifest import Entry
from weight_bus.transports import Transport, TransportFactory, make_transport
from weight_bus.transports.base import ignore

KINDS = ("again", "stale", "twice", "swapped")
HISTORY = 40


class DataFaults:
    """What is to happen to the next change at each subscriber, and what has happened."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._due: dict[str, str] = {}
        self._lock = threading.Lock()
        self.planted: list[tuple[str, int, str]] = []
        """(subscriber, version, kind), only where other bytes were given than had come."""

    def plan(self, name: str, kind: str = "") -> None:
        """One fault for this subscriber's next change that it fits; without a kind, any."""
        self._due[name] = kind or self._rng.choice(KINDS)

    def clear(self) -> None:
        """Let everything pass from now on."""
        self._due.clear()

    def alter(self, name: str, version: int, pieces: Sequence[torch.Tensor], history: list[torch.Tensor]) -> None:
        """Do what is due to a change that has come, in place."""
        real = torch.cat(list(pieces))
        with self._lock:
            kind = self._due.get(name, "")
            given = self._given(kind, real, pieces[0].numel(), history)
            if given is not None and not torch.equal(given, real):
                del self._due[name]
                self.planted.append((name, version, kind))
                for piece, part in zip(pieces, torch.split(given, [p.numel() for p in pieces]), strict=True):
                    piece.copy_(part)
        history.append(real)
        del history[:-HISTORY]

    def _given(self, kind: str, real: torch.Tensor, piece: int, history: list[torch.Tensor]) -> torch.Tensor | None:
        """What to give instead; None when there is nothing to do."""
        if kind in ("twice", "swapped") and real.numel() > piece:
            first, rest = real[:piece], real[piece:]
            return torch.cat([first, first, rest] if kind == "twice" else [rest[:piece], first, rest[piece:]])[
                : real.numel()
            ]
        if kind in ("again", "stale") and history:
            fitting = [one for one in history if one.numel() == real.numel() and not torch.equal(one, real)]
            found = history[-1] if kind == "again" else self._rng.choice(fitting or history)
            return torch.cat([found, real[found.numel() :]])[: real.numel()]
        return None


class Wire:
    """A subscriber's transport. It is told (`label`) which version comes, and whether as a change."""

    def __init__(self, inner: Transport, faults: DataFaults, name: str) -> None:
        self._inner, self._faults, self._name = inner, faults, name
        self._version, self._is_change = -1, False
        self._pieces: list[torch.Tensor] = []
        self._history: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def label(self, version: int, entries: Sequence[Sequence[Entry]] | None) -> None:
        """See `Labelled.label`."""
        self._version, self._is_change, self._pieces = version, entries is None, []

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """See `Transport.broadcast`."""
        self._inner.broadcast(bucket, index)
        self._pieces.append(bucket)

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        """See `Transport.finish`."""
        self._inner.finish(arrived)
        if self._is_change:
            self._faults.alter(self._name, self._version, self._pieces, self._history)


def wires(faults: DataFaults, name: str) -> TransportFactory:
    """A transport factory for one subscriber."""

    def make(config: WeightBus, host: str = HOST) -> Transport:
        wire: Any = Wire(make_transport(config, host), faults, name)
        return wire  # type: ignore[no-any-return]

    return make
