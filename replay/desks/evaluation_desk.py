"""The evaluation desk: one server evaluates a stated version, and the learner gets the result, also when it asks again.

Results stay in the journal as long as a resumed learner may ask for them: it repeats steps whose versions no engine has
any more. No socket, and time is an argument.
"""

import logging
from collections.abc import Sequence
from typing import Any

from configs.schema import Config
from replay import messages as m
from replay.channel import Message
from replay.channel.frames import encode
from replay.desks.buffer import GroupBuffer
from replay.desks.evaluations import EvaluationBoard
from replay.desks.lease_desk import Send
from replay.desks.validation import problem_with_evaluation
from replay.journal import Journal, Location
from replay.journal.format import Frames
from replay.peers import Peer, Peers
from replay.prompts import stream_seed

log = logging.getLogger(__name__)


class EvaluationDesk:
    """Requests, assignments and results of evaluations."""

    def __init__(
        self,
        config: Config,
        rows: Sequence[dict[str, Any]],
        buffer: GroupBuffer,
        peers: Peers,
        *,
        journal: Journal,
        send: Send,
    ) -> None:
        self.config, self.buffer, self.peers, self.journal = config, buffer, peers, journal
        self.rows = list(rows[: config.evaluation.num_prompts])
        wanted = {True: config.evaluation.greedy, False: config.evaluation.sampled}
        modes = [greedy for greedy, on in wanted.items() if on]
        self.board = EvaluationBoard(modes if rows else [], config.evaluation.deadline_s)
        self.results: dict[int, dict[bool, Location]] = {}
        """Where the journal has what came, by version and mode."""
        self.withheld: set[int] = set()
        """Versions of which the present learner has not been told: it has not made them, and may make others."""
        self.given_up = 0
        self._send = send

    def request(self, version: int, now: float) -> None:
        """The learner wants `version` evaluated; what is known already it gets at once."""
        if version in self.board.closed or version in self.results:
            self.withheld.add(version)
            self.made(self.buffer.version)
        elif version not in self.board.open and self.board.modes:
            self.board.request(version, now)
            self.journal.append("evaluate", {"version": version})
            if version < self.buffer.line.last_committed:  # a resumed learner repeats it without publishing it
                self.board.close(version, "the learner was restarted before anybody evaluated it")
                self._closed(version)

    def made(self, version: int) -> None:
        """The learner has made (again) the versions up to `version`, as the journal has them: it may hear of them."""
        for told in [v for v in sorted(self.withheld) if v <= version]:
            self.withheld.discard(told)
            for location in self.results.get(told, {}).values():
                self._to_learner(self.journal.read(location))
            if told in self.board.closed:
                self._to_learner(m.EvaluationClosed(version=told, reason=self.board.closed[told]))

    def joined(self, peer: Peer) -> None:
        """It may hold a version that was closed while it was silent."""
        for version in self.board.closed:
            self._send(peer.identity, m.EvaluationClosed(version=version))

    def holds(self, peer: Peer, version: int) -> None:
        """A server reports which version is live there."""
        self.board.holds(peer.identity, version)
        if version in self.board.closed:  # it got the version after everybody was told
            self._send(peer.identity, m.EvaluationClosed(version=version))

    def assign(self) -> None:
        """Hand out what can start now."""
        for server, evaluation in self.board.assign():
            self.journal.append("evaluating", {"version": evaluation.version, "server": server})
            for greedy in evaluation.open_modes:
                seed = stream_seed(self.config.run.seed, evaluation.version, 1 << 20)
                self._send(
                    server,
                    m.EvaluationLease(version=evaluation.version, greedy=greedy, seed=seed, prompts=self.rows),
                )

    def result(self, peer: Peer, result: m.EvaluationResult, frames: Frames = ()) -> None:
        """A part of an evaluation is done."""
        problem = problem_with_evaluation(result, len(self.rows))
        if problem is not None:
            log.warning(
                "replay: evaluation of version %d by %r rejected: %s [corrupt]", result.version, peer.name, problem
            )
            self._failed_at(peer, result.version)
            return
        if not self.board.result(peer.identity, result.version, result.greedy):
            return
        fields = {"version": result.version, "greedy": result.greedy}
        place = self.journal.append("evaluated", fields, frames or encode(result, "", 0))
        self.results.setdefault(result.version, {})[result.greedy] = place
        if result.version <= self.buffer.version:
            self._to_learner(result)
        else:
            self.withheld.add(result.version)
        if result.version in self.board.closed:
            self._closed(result.version)

    def failed(self, peer: Peer, message: m.EvaluationFailed) -> None:
        """The server that runs it could not; another may."""
        log.warning("replay: %r could not evaluate version %d: %s", peer.name, message.version, message.reason)
        self._failed_at(peer, message.version)

    def expire(self, now: float) -> None:
        """Give up what took too long."""
        for version, reason in self.board.overdue(now):
            log.warning("replay: evaluation of version %d given up: %s [slow]", version, reason)
            self.given_up += 1
            self._closed(version)

    def forget(self, version: int) -> None:
        """No learner will resume below `version`."""
        for old in [v for v in self.results if v < version]:
            del self.results[old]

    def supersede(self, version: int) -> None:
        """The policies from `version` on are gone: their successors are evaluated when the learner asks for it."""
        for gone in self.board.supersede(version):
            self.results.pop(gone, None)
            self.withheld.discard(gone)
            for peer in self.peers.role("rollout_server"):
                self._send(peer.identity, m.EvaluationClosed(version=gone, reason="its policy is not on the line"))

    def first_segment(self) -> int | None:
        """Number of the oldest file of the journal that a kept result is in."""
        return min((place.segment for parts in self.results.values() for place in parts.values()), default=None)

    def _failed_at(self, peer: Peer, version: int) -> None:
        if self.board.failed(peer.identity, version):
            self.given_up += 1
            self._closed(version)

    def _closed(self, version: int) -> None:
        reason = self.board.closed[version]
        self.journal.append("evaluation_closed", {"version": version, "reason": reason})
        for peer in self.peers.role("rollout_server"):
            self._send(peer.identity, m.EvaluationClosed(version=version, reason=reason))
        if version <= self.buffer.version:
            self._to_learner(m.EvaluationClosed(version=version, reason=reason))
        else:
            self.withheld.add(version)

    def _to_learner(self, message: Message) -> None:
        first = self.peers.rank(0)
        if first is not None:
            self._send(first.identity, message)
