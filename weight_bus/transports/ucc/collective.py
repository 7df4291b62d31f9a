"""Buckets as broadcasts in a UCC group of the current epoch, through host memory. Experimental: docs/weight-bus.md.

A lost peer is fatal for a process with a UCC group: measured were a broadcast that returned as if all were well, a
std::terminate, and a destroy and an interpreter exit that never ended. So no collective runs in the process that trains
or serves. Each group has a process of its own (process.py), which may die or hang:

- It is forked from one that has imported torch and does nothing else, so a new group costs no seconds.
- Buckets pass through memory that both share; only orders and answers of a few bytes go between them (member.py).
- Every order has a limit by this side's clock. A process that misses it, or hangs up, is killed and reaped. A group
  ends with its process, also a healthy one.
- A returned broadcast is no delivery. The sum after the last bucket is: it comes out right only when every member has
  counted every bucket.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from configs.infrastructure import WeightBus
from configs.schema import is_loopback
from weight_bus.errors import TransportError
from weight_bus.transports.base import Formation, ignore
from weight_bus.transports.meeting import GroupTransport, formed
from weight_bus.transports.ucc import resolve_ucc
from weight_bus.transports.ucc.member import HOPELESS_S, REAP_S, SharedBytes, Starter, UccProcess

log = logging.getLogger(__name__)

PACKAGE_ROOT = str(Path(__file__).parents[3])
START_S = 5.0  # how long forming a group waits for a process that starts anew, here and on the other members
SLACK_S = 1.0  # for the process to say by itself what went wrong, past its own time-out


class UccCollective(GroupTransport):
    """A UCC group per epoch, a process each. Buckets live in host memory. Raises WeightBusError, see `resolve_ucc`."""

    backend = "ucc"
    device = torch.device("cpu")
    _rank = 0
    _member: UccProcess | None = None

    def __init__(self, config: WeightBus, host: str) -> None:
        super().__init__(config, host)
        self._name = resolve_ucc()
        self._environment = _environment(host)
        self._memory = SharedBytes()
        self._starter = Starter(self._memory, self._environment)
        devices = self._environment.get("UCX_NET_DEVICES")
        log.info("weight bus: ucc is %s, over %s", self._name, devices or "any interface (UCX_NET_DEVICES is not set)")

    def facts(self) -> dict[str, str]:
        """Backend, kind of UCC, protocol; once a process for a group is ready. Raises TransportError after a minute."""
        self._present().await_ready(HOPELESS_S)
        return {**super().facts(), "ucc": self._name}

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """One bucket from rank 0 to all. It has arrived here when this returns; elsewhere only after `finish`."""
        size = bucket.numel()
        with self._or_leave(f"broadcast of bucket {index + 1} failed"):
            member = formed(self._member)
            try:
                shared = self._memory.room(size)
            except OSError as error:
                raise TransportError(f"no {size} bytes of memory to share: {error}", "full") from error
            if self._rank == 0:
                shared.copy_(bucket)
            member.ask(self._timeout_s + SLACK_S, do="broadcast", bytes=size)
            if self._rank != 0:
                bucket.copy_(shared)

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        """Wait until every member has every bucket, on all of them."""
        with self._or_leave("the closing sum failed"):
            formed(self._member).ask(self._timeout_s + SLACK_S, do="finish")

    def leave(self) -> None:
        """Kill the process of the group: UCC has no other end that is bounded."""
        member, self._member = self._member, None
        if member is not None:
            member.kill()

    def close(self) -> None:
        """Drop the group, both processes, the memory and the store."""
        super().close()
        self._starter.kill()
        self._memory.close()

    def _enter(self, formation: Formation) -> None:
        """In a process of its own: show up in the store, build the group, prove it with a broadcast of a few bytes."""
        deadline = time.monotonic() + START_S
        starter = self._present()
        starter.await_ready(START_S)
        self._rank, self._member = formation.rank, starter.fork(REAP_S)
        patience_s = max(0.0, deadline - time.monotonic()) + self._timeout_s
        order: dict[str, Any] = {**asdict(formation), "timeout_s": self._timeout_s, "patience_s": patience_s}
        # to meet, then the first broadcast (which connects UCC) and the closing sum
        self._member.ask(patience_s + 2 * self._timeout_s + SLACK_S, do="form", **order)

    def _present(self) -> Starter:
        """The process that forks; a new one where it has ended, with the thread that had started it or otherwise."""
        if self._starter.ended:
            self._starter.kill()
            self._starter = Starter(self._memory, self._environment)
        return self._starter


def _environment(host: str) -> dict[str, str]:
    """Of the processes: this one's, without threads that a fork would lose; a run on loopback stays there with UCX."""
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    loopback = {"UCX_NET_DEVICES": "lo"} if is_loopback(host) else {}
    return {**loopback, **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
