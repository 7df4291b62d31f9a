"""Which bit changes where, and the transport on which it does."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from configs.infrastructure import WeightBus
from weight_bus.manifest import Manifest
from weight_bus.transports import Transport, make_transport

ALL = "all"


@dataclass(frozen=True, slots=True)
class Flip:
    """A bit to change. Example: Flip("wire", "receiver-1", "layers.0.q", byte=17, bit=6)"""

    place: str
    victim: str
    """Name of a subscriber, or `all`: the publisher sends it to each of them."""
    tensor: str
    byte: int
    """Within the tensor."""
    bit: int


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    """Change one bit of a contiguous tensor in place."""
    tensor.view(-1).view(torch.uint8)[byte] ^= 1 << bit


class Saboteur:
    """Holds the flip that is due, until the place where it belongs takes it, once."""

    def __init__(self, layout: Manifest, *, delta: bool) -> None:
        self._places = {entry.name: (entry.bucket, entry.offset) for entry in layout.entries}
        self._delta = delta
        self._lock = threading.Lock()
        self.due: Flip | None = None

    def take(self, place: str, victim: str) -> Flip | None:
        """The flip, if it is meant for here."""
        with self._lock:
            found = self.due
            if found is None or (found.place, found.victim) != (place, victim):
                return None
            self.due = None
            return found

    def spoil(self, bucket: torch.Tensor, index: int, victim: str) -> None:
        """Change what is on the wire, if that is due."""
        found = self.due
        if found is None:
            return
        at, offset = self._places[found.tensor]
        if index == (0 if self._delta else at) and self.take("wire", victim) is not None:
            # a coded change is one piece, in which a tensor has no place of its own
            flip(bucket, (offset + found.byte) % bucket.numel(), found.bit)


class Wire:
    """A transport on which bits may flip: at a subscriber after they have come, at the publisher in a copy."""

    def __init__(self, inner: Transport, saboteur: Saboteur, victim: str) -> None:
        self._inner, self._saboteur, self._victim = inner, saboteur, victim

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """See `Transport.broadcast`."""
        if self._victim == ALL:
            bucket = bucket.clone()  # what the publisher keeps for resends stays right
            self._saboteur.spoil(bucket, index, ALL)
        self._inner.broadcast(bucket, index)
        if self._victim != ALL:
            self._saboteur.spoil(bucket, index, self._victim)


def wires(saboteur: Saboteur, victim: str) -> Callable[[WeightBus, str], Transport]:
    """A transport factory."""

    def make(config: WeightBus, host: str) -> Transport:
        wire: Any = Wire(make_transport(config, host), saboteur, victim)
        return wire  # type: ignore[no-any-return]

    return make
