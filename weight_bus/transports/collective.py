"""Buckets as broadcasts in a process group of the current epoch.

The group is a bare gloo backend over a prefix of a TCPStore: it is registered nowhere, never touches the
default group of torch.distributed, and so can be dropped and built anew while the learner trains.

Measured behaviour that the bus is built around: when a peer dies or hangs in a broadcast, the others block
for the full group timeout; abort from another thread does not wake them; a broken group fails at once, and a
new group under another prefix builds in milliseconds in the same processes.
"""

import socket
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, missing in the stubs
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from configs.infrastructure import WeightBus
from weight_bus.errors import TransportError, WeightBusError
from weight_bus.transports.base import Formation


class Collective:
    """A gloo group per epoch.

    Raises:
        WeightBusError: the backend is not gloo.
    """

    def __init__(self, config: WeightBus, host: str) -> None:
        if config.backend != "gloo":
            raise WeightBusError(
                f"weight_bus.backend {config.backend!r} is not available in this version; take weight_bus.backend: gloo"
            )
        self._host = host
        self._timeout = timedelta(seconds=config.collective_timeout_s)
        self._endpoint = ""
        self._store: TCPStore | None = None
        self._group: ProcessGroupGloo | None = None

    def serve(self) -> str:
        """Start the store on the interface `host` only; it has no authentication of its own."""
        if self._store is None:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            with socket.create_server((self._host, 0), family=family) as listener:
                port = listener.getsockname()[1]
                self._store = TCPStore(
                    self._host,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=self._timeout,
                    master_listen_fd=listener.detach(),
                )
            self._endpoint = f"{self._host}:{port}"
        return self._endpoint

    def form(self, formation: Formation) -> None:
        """Enter the group of an epoch; waits at most the collective timeout for the other members."""
        self.leave()
        try:
            store = PrefixStore(formation.prefix, self._store_at(formation.endpoint))
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs call it Options
            options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
            options._timeout = self._timeout
            self._group = ProcessGroupGloo(store, formation.rank, formation.size, options)
        except RuntimeError as error:
            if formation.rank:
                self._store = None
            raise _lost(f"epoch {formation.epoch} with {formation.size} members did not form", error) from error

    def broadcast(self, bucket: torch.Tensor, index: int) -> None:
        """One bucket from rank 0 to all."""
        if self._group is None:
            raise TransportError(f"bucket {index + 1}: no group is formed", "closed")
        try:
            self._group.broadcast(bucket, 0).wait()  # type: ignore[attr-defined]  # inherited from Backend
        except RuntimeError as error:
            raise _lost(f"broadcast of bucket {index + 1} failed", error) from error

    def leave(self) -> None:
        """Drop the group. Its sockets close with it."""
        self._group = None

    def close(self) -> None:
        """Drop the group and the store."""
        self.leave()
        self._store = None

    def _store_at(self, endpoint: str) -> TCPStore:
        if self._store is None or endpoint != self._endpoint:
            host, _, port = endpoint.rpartition(":")
            if not host or not port.isdigit():
                raise TransportError(f"endpoint {endpoint[:80]!r} is not host:port", "corrupt")
            self._store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout)
            self._endpoint = endpoint
        return self._store


def _lost(what: str, error: RuntimeError) -> TransportError:
    # gloo puts its source position before, and advice after the reason
    text = str(error).strip().splitlines()[0].rpartition("] ")[2].partition(". This")[0]
    lowered = text.lower()
    closed = any(word in lowered for word in ("closed", "reset", "refused", "broken pipe"))
    return TransportError(f"{what}: {text}", "closed" if closed else "silent")
