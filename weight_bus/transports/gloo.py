"""Buckets as broadcasts in a gloo group of the current epoch, through host memory.

The group is a bare gloo backend over a prefix of a TCPStore: registered nowhere, apart from the default group of
torch.distributed, it can be dropped and built anew while the learner trains.

Measured behaviour that the bus is built around: when a peer dies or hangs in a broadcast, the others block for the full
group timeout; abort from another thread does not wake them; a broken group fails at once, and a new one under another
prefix builds in milliseconds in the same processes. A peer that is lost while the group is being built, between its
address and its connection, holds the others for five timeouts. So all meet first, with the whole timeout, and the group
is then built with a fifth of it.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from weight_bus.transports.base import Formation, ignore
from weight_bus.transports.meeting import GroupTransport, formed, naming

TRIES = 5  # timeouts for which gloo waits for a connection


class GlooCollective(GroupTransport):
    """A gloo group per epoch. Buckets live in host memory."""

    backend = "gloo"
    device = torch.device("cpu")
    _group: ProcessGroupGloo | None = None

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """One bucket from rank 0 to all; it has arrived here when this returns."""
        with naming(f"broadcast of bucket {index + 1} failed"):
            formed(self._group).broadcast(bucket, 0).wait()  # type: ignore[attr-defined]  # inherited from Backend

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        """Nothing is under way: what rank 0 has written to its sockets arrives without it."""

    def leave(self) -> None:
        """Drop the group. Its sockets close with it."""
        self._group = None

    def _enter(self, formation: Formation) -> None:
        store = self._meeting.at(formation)
        self._meeting.show_up(store, formation, self._timeout_s)
        self._group = self._connected(store, formation, self._timeout_s / TRIES)
        self._group._set_default_timeout(timedelta(seconds=self._timeout_s))

    def _connected(self, store: PrefixStore, formation: Formation, timeout_s: float) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs call it Options
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            return ProcessGroupGloo(store, formation.rank, formation.size, options)
        except RuntimeError:
            # The device listens as long as anything holds it, be it a traceback, and hands a connection that comes late
            # to a part of the group that is freed by now: the process would end by SIGSEGV.
            options._devices = []
            raise
