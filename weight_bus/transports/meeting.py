"""Groups per epoch: their members meet in a TCPStore that the publisher serves, under a prefix for each epoch."""

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from configs.infrastructure import WeightBus
from weight_bus.errors import TransportError
from weight_bus.manifest import Layout
from weight_bus.transports.base import PROTOCOL, Formation

log = logging.getLogger(__name__)

T = TypeVar("T")
HERE = "here/"  # keys by which members show up, a rank each
OPEN = "open"  # key that is there from the start


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
            self._store.set(OPEN, "1")
            self._endpoint = f"{self._host}:{port}"
        return self._endpoint

    @property
    def is_open(self) -> bool:
        """Whether this end can reach the store that it serves, and others can, too."""
        try:
            if self._store is not None:
                self._store.wait([OPEN], self._timeout)
                host, _, port = self._endpoint.rpartition(":")
                socket.create_connection((host, int(port)), self._timeout.total_seconds()).close()
        except (OSError, RuntimeError):
            return False
        return self._store is not None

    def at(self, formation: Formation) -> PrefixStore:
        """The store of a group. Raises TransportError: the endpoint is none; RuntimeError: there is no store."""
        if self._store is None or formation.endpoint != self._endpoint:
            host, _, port = formation.endpoint.rpartition(":")
            if not host or not port.isdigit():
                raise TransportError(f"endpoint {formation.endpoint[:80]!r} is not host:port", "corrupt")
            self._store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout)
            self._endpoint = formation.endpoint
        return PrefixStore(formation.prefix, self._store)

    def show_up(self, store: PrefixStore, formation: Formation, within_s: float) -> None:
        """Barrier: wait until every member has registered, so that none connects to one that is absent.

        Raises TransportError: which ranks did not register in time.
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


class GroupTransport:
    """One member's end, see `Transport`. Subclasses enter a group (`_enter`), leave it, and carry buckets."""

    backend: str

    def __init__(self, config: WeightBus, host: str, meeting: Meeting | None = None) -> None:
        self._config, self._host = config, host
        self._timeout_s = config.collective_timeout_s
        self._meeting = meeting or Meeting(host, timedelta(seconds=config.collective_timeout_s))

    def facts(self) -> dict[str, str]:
        return {"backend": self.backend, "protocol": PROTOCOL}

    def serve(self) -> str:
        return self._meeting.serve()

    def renew(self) -> str | None:
        if self._meeting.is_open:
            return None
        self._meeting.forget()
        try:
            return self._meeting.serve()
        except (OSError, RuntimeError) as error:
            log.warning("weight bus: no meeting point can be opened on %s: %s", self._host, error)
            return ""

    def form(self, formation: Formation) -> None:
        self.leave()
        try:
            with self._or_leave(f"epoch {formation.epoch} with {formation.size} members did not form"):
                self._enter(formation)
        except TransportError:
            if formation.rank:
                self._meeting.forget()
            raise

    def label(self, version: int, layout: Layout | None) -> None:
        """A group carries bytes, whatever they are."""

    def leave(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.leave()
        self._meeting.forget()

    def _enter(self, formation: Formation) -> None:
        raise NotImplementedError

    @contextmanager
    def _or_leave(self, what: str) -> Iterator[None]:
        """As `naming`, and the group is left before the error is known."""
        try:
            with naming(what):
                yield
        except TransportError:
            self.leave()
            raise


@contextmanager
def naming(what: str) -> Iterator[None]:
    """A group that breaks raises TransportError, which begins with what that prevented."""
    try:
        yield
    except RuntimeError as error:
        raise (error if isinstance(error, TransportError) else lost(error)).during(what) from error


def formed(group: T | None) -> T:
    """The group. Raises TransportError where there is none."""
    if group is None:
        raise TransportError("no group is formed", "closed")
    return group
