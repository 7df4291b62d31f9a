"""Buckets as broadcasts in a UCC group of the current epoch, through host memory. Experimental: docs/ucc.md.

A lost peer is fatal for a process with a UCC group: measured were a broadcast that returned as if all were well, a
std::terminate, and a destroy and an interpreter exit that never ended. So no collective runs in the process that trains
or serves. Each group has a process of its own (process.py), which may die or hang:

- It is forked from one that has imported torch and does nothing else, so a new group costs no seconds.
- Buckets are copied into memory that both sides share, and out of it on the other side. Through the sockets between
  them (member.py) go orders and answers of a few bytes, as msgpack.
- Every order has a limit by this side's clock. A process that misses it, or hangs up, is killed and reaped. A group
  ends with its process, also a healthy one.
- A returned broadcast is no delivery. A sum over all members, taken after the last bucket, is: it comes out right only
  when every member has counted every bucket.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from configs.infrastructure import WeightBus
from configs.schema import is_loopback
from weight_bus.errors import TransportError
from weight_bus.transports.base import PROTOCOL, Formation, ignore
from weight_bus.transports.meeting import Meeting
from weight_bus.transports.ucc.member import HOPELESS_S, REAP_S, Member, SharedBytes, Starter
from weight_bus.transports.ucc.source import resolve_ucc, ucc_name

log = logging.getLogger(__name__)

PACKAGE_ROOT = str(Path(__file__).parents[3])
START_S = 5.0
"""How long forming a group waits for a process that starts anew, here and on the other members."""
SLACK_S = 1.0
"""For the process to say by itself what went wrong, past its own time-out."""


class UccCollective:
    """A UCC group per epoch, in a process per group. Buckets live in host memory.

    Raises:
        WeightBusError: there is no UCC here (`resolve_ucc`).
    """

    device = torch.device("cpu")

    def __init__(self, config: WeightBus, host: str) -> None:
        self._name = ucc_name(resolve_ucc())
        self._timeout_s = config.collective_timeout_s
        self._meeting = Meeting(host, timedelta(seconds=config.collective_timeout_s))
        self._environment = _environment(host)
        self._memory = SharedBytes()
        self._starter = Starter(self._memory, self._environment)
        self._rank = 0
        self._member: Member | None = None
        devices = self._environment.get("UCX_NET_DEVICES")
        log.info("weight bus: ucc is %s, over %s", self._name, devices or "any interface (UCX_NET_DEVICES is not set)")

    def facts(self) -> dict[str, str]:
        """The backend, where UCC comes from, and the protocol.

        Returns when the process for a group is ready, so a transport that has stated them can form one at once.

        Raises:
            TransportError: it is not, after a minute.
        """
        self._present().await_ready(HOPELESS_S)
        return {"backend": "ucc", "protocol": PROTOCOL, "ucc": self._name}

    def serve(self) -> str:
        """Start the store on the interface `host` only; the processes of all members come there, also rank 0's."""
        return self._meeting.serve()

    def form(self, formation: Formation) -> None:
        """Enter the group of an epoch, in a process of its own.

        All members show up in the store, build the group, and prove it with a broadcast of a few bytes.
        """
        self.leave()
        what = f"epoch {formation.epoch} with {formation.size} members did not form"
        begun = time.monotonic()
        try:
            starter = self._present()
            starter.await_ready(START_S)
            self._rank, self._member = formation.rank, starter.fork(REAP_S)
        except TransportError as error:
            raise error.during(what) from error
        patience_s = max(0.0, START_S - (time.monotonic() - begun)) + self._timeout_s
        order = {
            "do": "form",
            "epoch": formation.epoch,
            "rank": formation.rank,
            "size": formation.size,
            "endpoint": formation.endpoint,
            "prefix": formation.prefix,
            "timeout_s": self._timeout_s,
            "patience_s": patience_s,
        }
        # to meet, then the first broadcast (which connects UCC) and the closing sum
        self._ask(order, patience_s + 2 * self._timeout_s, what)

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """One bucket from rank 0 to all. It has arrived here when this returns; elsewhere only after `finish`."""
        what = f"broadcast of bucket {index + 1} failed"
        if self._member is None:
            raise TransportError(f"bucket {index + 1}: no group is formed", "closed")
        size = bucket.numel()
        try:
            shared = self._memory.room(size)
        except OSError as error:
            self.leave()
            raise TransportError(f"{what}: no {size} bytes of memory to share: {error}", "full") from error
        if self._rank == 0:
            shared.copy_(bucket)
        self._ask({"do": "broadcast", "bytes": size}, self._timeout_s, what)
        if self._rank != 0:
            bucket.copy_(shared)

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        """Wait until every member has every bucket, on all of them."""
        if self._member is None:
            raise TransportError("no group is formed", "closed")
        self._ask({"do": "finish"}, self._timeout_s, "the closing sum failed")

    def leave(self) -> None:
        """Kill the process of the group: UCC has no other end that is bounded."""
        member, self._member = self._member, None
        if member is not None:
            member.kill()

    def close(self) -> None:
        """Drop the group, both processes, the memory and the store."""
        self.leave()
        self._starter.kill()
        self._meeting.forget()
        self._memory.close()

    def _ask(self, order: Mapping[str, Any], limit_s: float, what: str) -> None:
        assert self._member is not None
        try:
            self._member.ask(order, limit_s + SLACK_S, what)
        except TransportError:
            self._member = None
            raise

    def _present(self) -> Starter:
        """The process that forks; a new one where it has ended, with the thread that had started it or otherwise."""
        if self._starter.ended:
            self._starter.kill()
            self._starter = Starter(self._memory, self._environment)
        return self._starter


def _environment(host: str) -> dict[str, str]:
    """Of the processes: this one's, without threads that would be lost in a fork.

    A run that stays on this machine does not listen on its other interfaces.
    """
    path = os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
    loopback = {"UCX_NET_DEVICES": "lo"} if is_loopback(host) else {}
    return {**loopback, **os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": path}
