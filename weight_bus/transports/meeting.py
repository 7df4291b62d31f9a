"""Where the members of a group meet: a TCPStore that the publisher serves, under a prefix for each epoch."""

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, missing in the stubs
from torch.distributed.distributed_c10d import PrefixStore

from weight_bus.errors import TransportError
from weight_bus.transports.base import Formation

HERE = "here/"
"""Keys by which members show up, a rank each."""


class Meeting:
    """The store of one member. It has no authentication of its own, so it binds the interface `host` only."""

    def __init__(self, host: str, timeout: timedelta) -> None:
        self._host = host
        self._timeout = timeout
        self._endpoint = ""
        self._store: TCPStore | None = None

    def serve(self) -> str:
        """Start the store (once); its endpoint."""
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

    def at(self, formation: Formation) -> PrefixStore:
        """The store of a group.

        Raises:
            TransportError: the endpoint is none.
            RuntimeError: there is no store.
        """
        if self._store is None or formation.endpoint != self._endpoint:
            host, _, port = formation.endpoint.rpartition(":")
            if not host or not port.isdigit():
                raise TransportError(f"endpoint {formation.endpoint[:80]!r} is not host:port", "corrupt")
            self._store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout)
            self._endpoint = formation.endpoint
        return PrefixStore(formation.prefix, self._store)

    def show_up(self, store: PrefixStore, formation: Formation, within_s: float) -> None:
        """Barrier: wait until every member has registered, so that none connects to one that is absent.

        Raises:
            TransportError: which ranks did not register in time.
        """
        keys = [f"{HERE}{rank}" for rank in range(formation.size)]
        store.set(keys[formation.rank], "1")
        try:
            store.wait(keys, timedelta(seconds=within_s))
        except RuntimeError as error:
            away = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            if not away:
                raise
            raise TransportError(f"rank {', '.join(away)} did not come in {within_s:.1f} s", "silent") from error

    def forget(self) -> None:
        """Drop the store; a member connects anew."""
        self._store = None


def lost(error: RuntimeError) -> TransportError:
    """A failed collective as an error of the bus: closed where a connection ended, else silent."""
    # gloo and c10d put their source position before, and advice after the reason
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    text = first.rpartition("] ")[2].partition(". This")[0]
    ends = ("closed", "reset", "refused", "broken pipe", "remote process exited")
    return TransportError(text, "closed" if any(word in text.lower() for word in ends) else "silent")
