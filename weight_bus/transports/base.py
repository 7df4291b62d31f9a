"""What the weight bus asks of its data plane: a group per epoch and a broadcast from rank 0."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from configs.infrastructure import WeightBus


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """One membership as one member sees it.

    Example: Formation(epoch=4, rank=2, size=3, endpoint="127.0.0.1:40211", prefix="toy/wb/1/4")
    """

    epoch: int
    rank: int
    """0 is the publisher."""
    size: int
    endpoint: str
    prefix: str
    """Unique per run, incarnation and epoch, so that no two groups meet."""


def group_prefix(run_id: str, incarnation: int, epoch: int) -> str:
    """The prefix of a group's keys."""
    return f"{run_id}/wb/{incarnation}/{epoch}"


class Transport(Protocol):
    """One member's end. Used by one thread at a time; every call ends within the collective timeout."""

    def serve(self) -> str:
        """Publisher only: open the meeting point (once) and return its endpoint."""

    def form(self, formation: Formation) -> None:
        """Leave the present group and enter this one. Raises TransportError when a member stays away."""

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """Send (rank 0) or fill `bucket`, flat uint8 in host memory. Raises TransportError when a peer is lost."""

    def leave(self) -> None:
        """Drop the present group, broken or not."""

    def close(self) -> None:
        """Drop everything."""


TransportFactory = Callable[[WeightBus, str], Transport]
"""(config, host of the interface to bind) -> a transport."""
