"""Staging in another process of this machine: the subscriber's end of the line to a receiver."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from configs.infrastructure import WeightBus
from replay.channel import WireError
from weight_bus.errors import TransportError
from weight_bus.intake import Load, Received
from weight_bus.manifest import Entry, Manifest, alignment_of
from weight_bus.messages import Begin, manifest_of
from weight_bus.remote.line import Forget, Line, NotTaken, Taken
from weight_bus.transports.base import FORMING

log = logging.getLogger(__name__)

FORGET_S = 15.0
"""More than a transport takes to abort a broken group."""
SLACK_S = 30.0
"""Beside what the transport takes: a scheduler that computes holds the interpreter."""
VERIFIED_BYTES_PER_S = 50e6
"""Digests, and undoing a change, at the very least."""


@dataclass(frozen=True, slots=True)
class RemoteUpdate:
    """An update that is staged elsewhere, proven."""

    entries: tuple[Entry, ...]
    """`bucket` and `offset` say where a tensor lies."""
    memory: list[Any]
    """See `Taken.memory`."""


RemoteLoad = Callable[[int, RemoteUpdate], Mapping[str, int]]
"""(version, update) -> digests of what the engine holds afterwards."""


class RemoteIntake(Received):
    """Has a receiver stage one version at a time; see `Intake`, whose place it takes.

    Args:
        connect: the line to the receiver; called once, by the thread that receives.
        config: the weight_bus section.
        run_id: of the subscriber.
        load: takes the place of the load callback, because there are no tensors here.
        slack_s: how late the receiver may be.
    """

    ranks = 1

    def __init__(
        self, connect: Callable[[], Line], config: WeightBus, run_id: str, load: RemoteLoad, *, slack_s: float = SLACK_S
    ) -> None:
        super().__init__()
        self._connect, self._config, self._run_id, self._load = connect, config, run_id, load
        self._slack_s = slack_s
        self._line: Line | None = None
        self._memory: list[Any] = []
        self.manifest = Manifest((), ())

    @property
    def facts(self) -> dict[str, str]:
        """See `Intake.facts`. Connects to the receiver."""
        return self._connected().facts

    def take(self, begin: Begin) -> list[str]:
        """See `Intake.take`; a receiver that is lost is a peer that is lost."""
        self.staged = None
        manifest = manifest_of(begin, alignment_of(self._config))
        # the transport's own limits bound every broadcast; this bounds a receiver that stands still
        coming = -(-begin.wire_bytes // begin.bucket_bytes) if begin.base else len(manifest.bucket_sizes)
        limit_s = (FORMING + coming) * self._config.collective_timeout_s + self._slack_s
        limit_s += manifest.num_bytes / VERIFIED_BYTES_PER_S
        answer = self._connected().ask(begin, self._run_id, limit_s, f"v{begin.version} was not staged")
        if isinstance(answer, NotTaken):
            raise TransportError(answer.reason, answer.symptom) if answer.symptom else WireError(answer.reason)
        assert isinstance(answer, Taken)
        self.manifest, self._memory, self.seconds = manifest, answer.memory, answer.seconds
        if not answer.corrupt:
            self.staged = begin
        return answer.corrupt

    def apply(self, version: int, _: Load) -> Mapping[str, int]:
        """Have the engine load what is staged in it; digests of what it holds then."""
        return self._load(version, RemoteUpdate(self.manifest.entries, self._memory))

    def forget(self, *, resume: bool = True) -> None:
        """Drop the group and what is staged. A receiver that is lost is named by the next `take`."""
        self.staged = None
        if self._line is None or self._line.lost:
            return
        try:
            self._line.ask(Forget(), self._run_id, FORGET_S, "the group was not left")
        except TransportError as error:
            log.error("weight bus: %s", error)

    def close(self) -> None:
        """Drop the group. The receiver stays, for a later subscriber."""
        self.forget()

    def _connected(self) -> Line:
        if self._line is None:
            self._line = self._connect()
        return self._line
