"""Evaluations at one stated version, outside admission. No socket, no clock.

Every server that gets the version keeps it until it is closed; one runs the whole, and when it dies another takes over.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from replay.channel import shown
from replay.journal.format import Location
from replay.state.evaluation_parts import EvaluationPart

MAX_TRIES = 2
"""How often each holder of a version is asked, before its deadline closes it."""
MAX_CLOSED = 64
"""Closed versions to remember, for servers that still hold one."""


@dataclass(slots=True)
class Evaluation:
    """One version's evaluation: the parts still open, and the server that runs it."""

    version: int
    open_parts: list[EvaluationPart]
    """That have no result yet."""
    opened_at: float
    server: str | None = None
    tried: list[str] = field(default_factory=list)
    """Servers that were asked, each as often as it was."""


class PartResult(NamedTuple):
    """What came of a part."""

    place: Location
    asked: str
    """EvaluationWork.fingerprint of what was asked for."""


class EvaluationBoard:
    """Open evaluations and which servers hold their versions."""

    def __init__(self, parts: Iterable[EvaluationPart], deadline_s: float) -> None:
        self.parts, self.deadline_s = list(parts), deadline_s
        self.open: dict[int, Evaluation] = {}
        self.holders: dict[int, dict[str, None]] = {}
        """Servers by version, in the order in which they reported it."""
        self.closed: dict[int, str] = {}
        self.results: dict[int, dict[EvaluationPart, PartResult]] = {}
        """What came, by version and part."""

    def request(self, version: int, now: float) -> None:
        """The learner wants `version` evaluated. Repeating it changes nothing."""
        if self.parts and version not in self.open and version not in self.closed:
            self.open[version] = Evaluation(version, list(self.parts), now)

    def holds(self, server: str, version: int) -> None:
        """A server reports that `version` is live there (and so pinned, if it is to be evaluated)."""
        self.holders.setdefault(version, {})[server] = None
        for old in [v for v in self.holders if v not in self.open and v < version - 16]:
            del self.holders[old]

    def next_server(self, version: int) -> str | None:
        """The holder that an open evaluation can start at now: the one asked least."""
        evaluation, holders = self.open[version], self.holders.get(version, ())
        if evaluation.server is not None or not holders:
            return None
        server = min(holders, key=evaluation.tried.count)
        return server if evaluation.tried.count(server) < MAX_TRIES else None

    def begin(self, version: int, server: str) -> None:
        evaluation = self.open.get(version)
        if evaluation is not None:
            evaluation.server = server
            evaluation.tried.append(server)

    def wants(self, server: str, version: int, part: EvaluationPart) -> bool:
        """Whether a part is wanted from this server, not late and not repeated."""
        evaluation = self.open.get(version)
        return evaluation is not None and server in evaluation.tried and part in evaluation.open_parts

    def done(self, version: int, part: EvaluationPart, result: PartResult) -> None:
        evaluation = self.open.get(version)
        if evaluation is not None and part in evaluation.open_parts:
            evaluation.open_parts.remove(part)
        self.results.setdefault(version, {})[part] = result

    def failed(self, server: str, version: int) -> bool:
        """The server that runs this evaluation could not; another may. True when all were asked."""
        evaluation = self.open.get(version)
        if evaluation is None or evaluation.server != server:
            return False
        evaluation.server = None
        return bool(self.holders.get(version)) and self.next_server(version) is None

    def server_lost(self, server: str) -> None:
        """Its evaluations are free for another holder."""
        for holders in self.holders.values():
            holders.pop(server, None)
        for evaluation in self.open.values():
            if evaluation.server == server:
                evaluation.server = None

    def out_of_reach(self, past: int, here: Set[str]) -> list[int]:
        """Versions that none of the servers `here` was asked for, all of which are at `past` or later."""
        return [each.version for each in self.open.values() if each.version < past and here.isdisjoint(each.tried)]

    def overdue(self, now: float) -> list[tuple[int, str]]:
        """What takes too long: (version, reason) each."""
        late = [e for e in self.open.values() if now - e.opened_at > self.deadline_s]
        where = {e.version: f"at {shown(e.server)}" if e.server else "no server holds that version" for e in late}
        return [(e.version, f"not done within {self.deadline_s:g} s ({where[e.version]})") for e in late]

    def known_from(self, version: int) -> list[int]:
        """Versions from `version` on that were asked for."""
        return sorted(v for v in (*self.open, *self.closed) if v >= version)

    def supersede(self, version: int) -> None:
        """Forget the versions from `version` on, which others will take the place of."""
        for old in self.known_from(version):
            self.forget_one(old)
        self.holders = {v: servers for v, servers in self.holders.items() if v < version}

    def forget_one(self, version: int) -> None:
        """As if nobody had asked for this version."""
        self.open.pop(version, None)
        self.closed.pop(version, None)
        self.results.pop(version, None)

    def close(self, version: int, reason: str) -> None:
        """This version is not needed any more; an empty reason says that all parts are there."""
        if self.open.pop(version, None) is None:
            return
        self.closed[version] = reason
        while len(self.closed) > MAX_CLOSED:
            del self.closed[min(self.closed)]

    def forget(self, version: int) -> None:
        """No learner will resume below `version`."""
        for old in [v for v in self.results if v < version]:
            del self.results[old]

    def first_segment(self) -> int | None:
        """Number of the oldest file of the journal that a kept result is in."""
        return min((each.place.segment for parts in self.results.values() for each in parts.values()), default=None)
