"""Buckets as broadcasts in a gloo group of the current epoch, through host memory.

The group is a bare gloo backend over a prefix of a TCPStore: it is registered nowhere, never touches the
default group of torch.distributed, and so can be dropped and built anew while the learner trains.

Measured behaviour that the bus is built around: when a peer dies or hangs in a broadcast, the others block
for the full group timeout; abort from another thread does not wake them; a broken group fails at once, and a
new group under another prefix builds in milliseconds in the same processes. A peer that is lost while the group is
being built, between its address and its connection, holds the others for five timeouts. So all meet first, with the
whole timeout, and the group is then built with a fifth of it.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from configs.infrastructure import WeightBus
from weight_bus.errors import TransportError
from weight_bus.transports.base import PROTOCOL, Formation, ignore
from weight_bus.transports.meeting import Meeting, lost

TRIES = 5
"""Timeouts for which gloo waits for a connection."""


class Collective:
    """A gloo group per epoch. Buckets live in host memory."""

    device = torch.device("cpu")

    def __init__(self, config: WeightBus, host: str, meeting: Meeting | None = None) -> None:
        self._host = host
        self._timeout = timedelta(seconds=config.collective_timeout_s)
        self._meeting = meeting or Meeting(host, self._timeout)
        self._group: ProcessGroupGloo | None = None

    def facts(self) -> dict[str, str]:
        """The backend and the protocol."""
        return {"backend": "gloo", "protocol": PROTOCOL}

    def serve(self) -> str:
        """Start the store on the interface `host` only."""
        return self._meeting.serve()

    def form(self, formation: Formation) -> None:
        """Enter the group of an epoch; waits at most the collective timeout for the other members."""
        self.leave()
        what = f"epoch {formation.epoch} with {formation.size} members did not form"
        try:
            self._group = self._build(self._meeting.at(formation), formation)
        except TransportError as error:
            raise error.during(what) from error
        except RuntimeError as error:
            if formation.rank:
                self._meeting.forget()
            raise lost(what, error) from error

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """One bucket from rank 0 to all; it has arrived here when this returns."""
        if self._group is None:
            raise TransportError(f"bucket {index + 1}: no group is formed", "closed")
        try:
            self._group.broadcast(bucket, 0).wait()  # type: ignore[attr-defined]  # inherited from Backend
        except RuntimeError as error:
            raise lost(f"broadcast of bucket {index + 1} failed", error) from error

    def finish(self, arrived: Callable[[int], None] = ignore) -> None:
        """Nothing is under way: what rank 0 has written to its sockets arrives without it."""

    def leave(self) -> None:
        """Drop the group. Its sockets close with it."""
        self._group = None

    def close(self) -> None:
        """Drop the group and the store."""
        self.leave()
        self._meeting.forget()

    def _build(self, store: PrefixStore, formation: Formation) -> ProcessGroupGloo:
        """Build the group once all members have registered."""
        self._meeting.show_up(store, formation, self._timeout.total_seconds())
        group = self._connected(store, formation, self._timeout / TRIES)
        group._set_default_timeout(self._timeout)
        return group

    def _connected(self, store: PrefixStore, formation: Formation, timeout: timedelta) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs call it Options
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = timeout
        try:
            return ProcessGroupGloo(store, formation.rank, formation.size, options)
        except RuntimeError:
            # The device listens as long as anything holds it, be it a traceback, and hands a connection that comes late
            # to a part of the group that is freed by now: the process would end by SIGSEGV.
            options._devices = []
            raise
