"""What the collective transports share: a group per epoch, of members that meet in the publisher's store."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

from configs.infrastructure import WeightBus
from weight_bus.errors import TransportError
from weight_bus.transports.base import PROTOCOL, Formation
from weight_bus.transports.meeting import Meeting, lost

T = TypeVar("T")


class GroupTransport:
    """One member's end. Subclasses enter a group (`_enter`), leave it, and carry buckets."""

    backend: str

    def __init__(self, config: WeightBus, host: str, meeting: Meeting | None = None) -> None:
        self._config, self._host = config, host
        self._timeout_s = config.collective_timeout_s
        self._meeting = meeting or Meeting(host, timedelta(seconds=config.collective_timeout_s))

    def facts(self) -> dict[str, str]:
        """The backend and the protocol."""
        return {"backend": self.backend, "protocol": PROTOCOL}

    def serve(self) -> str:
        """Start the store on the interface `host` only."""
        return self._meeting.serve()

    def form(self, formation: Formation) -> None:
        """Enter the group of an epoch; waits at most the collective timeout for the other members."""
        self.leave()
        try:
            with self._or_leave(f"epoch {formation.epoch} with {formation.size} members did not form"):
                self._enter(formation)
        except TransportError:
            if formation.rank:
                self._meeting.forget()
            raise

    def leave(self) -> None:
        """Drop the group, broken or not."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop the group and the store."""
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
