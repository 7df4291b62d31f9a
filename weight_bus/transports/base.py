"""What the weight bus asks of its data plane: a group per epoch and a broadcast from rank 0."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from configs.infrastructure import WeightBus
from weight_bus.manifest import Layout

PROTOCOL = "5"
"""Of the bus: what Begin says, and what travels in a group (buckets in order, then the closing collective); a fact of
every transport, so that two releases that differ in it refuse each other when they join."""

FORMING = 4  # collective timeouts that forming a group may take: meeting, communicator, first collective and its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """One membership as one member sees it.

    Example: Formation(epoch=4, rank=2, size=3, endpoint="127.0.0.1:40211", prefix="toy/wb/1/4")
    """

    epoch: int
    rank: int  # 0 is the publisher
    size: int
    endpoint: str
    prefix: str  # unique per run, incarnation and epoch, so that no two groups meet


def group_prefix(run_id: str, incarnation: int, epoch: int) -> str:
    """The prefix of a group's keys."""
    return f"{run_id}/wb/{incarnation}/{epoch}"


def of_lane(formation: Formation, lane: int) -> Formation:
    """The group of another lane of the same epoch (weight_bus/lanes.py), given that of lane 0."""
    return replace(formation, prefix=f"{formation.prefix}.{lane}") if lane else formation


def ignore(index: int) -> None:
    """For callers of `finish` that do not follow its progress."""


class Transport(Protocol):
    """One member's end. Used by one thread at a time; every call ends within the collective timeout of its buckets."""

    @property
    def device(self) -> torch.device:
        """Where buckets must live: the CPU, or the CUDA device that was current when the transport was made."""

    def facts(self) -> dict[str, str]:
        """What both ends must have alike, by name. Compared when a subscriber joins, before anything collective."""

    def serve(self) -> str:
        """Publisher only: open the meeting point (once) and return its endpoint."""

    def renew(self) -> str | None:
        """Publisher only, after a failure: None where others can meet here. Else where they can from now on: a new
        meeting point, or empty while none can be opened."""

    def form(self, formation: Formation) -> None:
        """Leave the present group and enter this one. Raises TransportError when a member stays away."""

    def label(self, version: int, layout: Layout | None) -> None:
        """Before the first bucket: what the buckets hold, or None for a change of the version before."""

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """Send (rank 0) or fill `bucket`, flat uint8 on `device`; on a GPU only launched. Raises TransportError."""

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        """Wait until every bucket launched since the last call has arrived: here, and on rank 0 at all members.

        Calls `arrived` with the number of each. Raises TransportError when a peer is lost.
        """

    def leave(self) -> None:
        """Drop the present group, broken or not."""

    def close(self) -> None:
        """Drop everything."""


TransportFactory = Callable[[WeightBus, str], Transport]  # (config, host of the interface to bind) -> a transport


REMEDIES = {
    **{key: f"give both ends the same weight_bus.{key}" for key in ("backend", "transport")},
    "nccl": "install the same PyTorch and NCCL on both",
    "ucc": "install the same UCC on both, in PyTorch or as the plugin torch_ucc (docs/weight-bus.md)",
    "protocol": "run the same release of slipstream on both",
}
"""By fact; all others are variables of the environment."""


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Which facts differ, with both values, in words; "" when all are alike."""
    found = []
    for name in {**ours, **theirs}:
        there, here = theirs.get(name, "not stated"), ours.get(name, "not stated")
        if there != here:
            remedy = REMEDIES.get(name, f"set {name} alike on all nodes (network.env)")
            found.append(f"{name} is {there} there and {here} here, {remedy}")
    return "; ".join(found)
