"""Evaluations at one stated version, outside admission. No socket, no clock.

A version that is to be evaluated is kept (pinned) by every server that gets it, until it is closed. One
server runs the whole evaluation; when it dies, another that holds the version takes over.
"""

from dataclasses import dataclass, field

MAX_ROUNDS = 2
"""How often all holders of a version are asked, before its deadline closes it."""
MAX_CLOSED = 64
"""Closed versions to remember, for servers that still hold one."""


@dataclass(slots=True)
class Evaluation:
    """One version's evaluation: the modes still open, and who runs it."""

    version: int
    open_modes: list[bool]
    """`greedy` flags of the parts that have no result yet."""
    opened_at: float
    server: str | None = None
    tried: list[str] = field(default_factory=list)
    rounds: int = 1


class EvaluationBoard:
    """Open evaluations and which servers hold their versions."""

    def __init__(self, modes: list[bool], deadline_s: float) -> None:
        self.modes = modes
        self.deadline_s = deadline_s
        self.open: dict[int, Evaluation] = {}
        self.holders: dict[int, dict[str, None]] = {}
        """Servers by version, in the order in which they reported it."""
        self.closed: dict[int, str] = {}

    def request(self, version: int, now: float) -> None:
        """The learner wants `version` evaluated. Repeating it changes nothing."""
        if self.modes and version not in self.open and version not in self.closed:
            self.open[version] = Evaluation(version, list(self.modes), now)

    def holds(self, server: str, version: int) -> None:
        """A server reports that `version` is live there (and so pinned, if it is to be evaluated)."""
        self.holders.setdefault(version, {})[server] = None
        for old in [v for v in self.holders if v not in self.open and v < version - 16]:
            del self.holders[old]

    def assign(self) -> list[tuple[str, Evaluation]]:
        """Evaluations that can start now, each with the server that runs it."""
        started = []
        for evaluation in self.open.values():
            if evaluation.server is None:
                holders = list(self.holders.get(evaluation.version, ()))
                candidates = [s for s in holders if s not in evaluation.tried]
                if holders and not candidates and evaluation.rounds < MAX_ROUNDS:
                    evaluation.rounds += 1
                    evaluation.tried.clear()
                    candidates = holders
                if candidates:
                    evaluation.server = candidates[0]
                    evaluation.tried.append(candidates[0])
                    started.append((candidates[0], evaluation))
        return started

    def result(self, server: str, version: int, greedy: bool) -> bool:
        """A part is done; False when it is not wanted (late or repeated). Closes the last part's version."""
        evaluation = self.open.get(version)
        if evaluation is None or server not in evaluation.tried or greedy not in evaluation.open_modes:
            return False
        evaluation.open_modes.remove(greedy)
        if not evaluation.open_modes:
            self.close(version, "")
        return True

    def failed(self, server: str, version: int) -> bool:
        """The server that runs this evaluation could not; another may. True when all were asked: it is closed."""
        evaluation = self.open.get(version)
        if evaluation is None or evaluation.server != server:
            return False
        evaluation.server = None
        if evaluation.rounds < MAX_ROUNDS or set(self.holders.get(version, ())) - set(evaluation.tried):
            return False
        self.close(version, "every server that holds it failed")
        return True

    def server_lost(self, server: str) -> None:
        """Its evaluations are free for another holder."""
        for holders in self.holders.values():
            holders.pop(server, None)
        for evaluation in self.open.values():
            if evaluation.server == server:
                evaluation.server = None

    def overdue(self, now: float) -> list[tuple[int, str]]:
        """Close what took too long; (version, reason) each."""
        late = [e for e in self.open.values() if now - e.opened_at > self.deadline_s]
        for evaluation in late:
            where = f"at {evaluation.server}" if evaluation.server else "no server holds that version"
            self.close(evaluation.version, f"not done within {self.deadline_s:g} s ({where})")
        return [(e.version, self.closed[e.version]) for e in late]

    def supersede(self, version: int) -> list[int]:
        """Forget the versions from `version` on, which others will take the place of; those that anybody asked for."""
        gone = sorted(v for v in (*self.open, *self.closed) if v >= version)
        for old in gone:
            self.open.pop(old, None)
            self.closed.pop(old, None)
        self.holders = {v: servers for v, servers in self.holders.items() if v < version}
        return gone

    def close(self, version: int, reason: str) -> None:
        """Nobody needs this version any more; an empty reason says that all parts are there."""
        del self.open[version]
        self.closed[version] = reason
        while len(self.closed) > MAX_CLOSED:
            del self.closed[min(self.closed)]
