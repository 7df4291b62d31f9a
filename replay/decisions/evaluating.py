"""One server evaluates a stated version, and the learner gets the result, also when it asks again.

Results stay in the journal as long as a resumed learner may ask for them. No socket, and time is an argument.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from replay import messages as m
from replay.channel.frames import encode
from replay.journal.format import Frames
from replay.state.apply import record
from replay.state.evaluation_parts import EvaluationPart, EvaluationWork
from replay.state.evaluations import Evaluation
from replay.state.peers import Peer, Peers
from replay.state.run import RunState
from replay.state.validation import problem_with_evaluation

log = logging.getLogger(__name__)


class EvaluationScheduler:
    def __init__(self, run: RunState, peers: Peers, work: Mapping[EvaluationPart, EvaluationWork]) -> None:
        self.run, self.board, self.peers, self.work = run, run.board, peers, work
        self.withheld: set[int] = set()
        """Versions of which the present learner has not been told: it has not made them, and may make others."""

    def request(self, version: int, now: float) -> None:
        """The learner wants `version` evaluated; what is known already it gets at once.

        A run that is resumed with other prompts or settings evaluates it anew: its answers would be written beside
        prompts that are not theirs.
        """
        if self._asks_for_other_answers(version):
            log.info("replay: data.eval or evaluation were changed: version %d is evaluated anew", version)
            record(self.run, "evaluation_forgotten", {"version": version})
        if version in self.board.closed or version in self.board.results:
            self.withheld.add(version)
            self.made(self.run.buffer.version)
        elif version not in self.board.open and self.board.parts:
            record(self.run, "evaluate", {"version": version}, now=now)
            if version < self.run.buffer.line.last_committed:  # a resumed learner repeats it without publishing it
                self._close(version, "the learner was restarted before this version was evaluated")

    def made(self, version: int) -> None:
        """The learner has made (again) the versions up to `version`, as the journal has them: it may hear of them."""
        for told in [v for v in sorted(self.withheld) if v <= version]:
            self.withheld.discard(told)
            for result in self.board.results.get(told, {}).values():
                self.peers.to_rank(0, self.run.journal.read(result.place))
            if told in self.board.closed:
                self.peers.to_rank(0, m.EvaluationClosed(version=told, reason=self.board.closed[told]))

    def joined(self, peer: Peer) -> None:
        """It may hold a version that was closed while it was silent, and what it evaluates may be of other prompts."""
        for version in self.board.closed:
            self._release(peer, version)
        for evaluation in self.board.open.values():
            if evaluation.server == peer.identity:
                self._ask(evaluation, evaluation.open_parts)

    def holds(self, peer: Peer, version: int) -> None:
        """A server reports which version is live there."""
        self.board.holds(peer.identity, version)
        self._release(peer, version)  # it may have got the version after everybody was told

    def assign(self) -> None:
        """Hand out what can start now."""
        for version, evaluation in list(self.board.open.items()):
            server = self.board.next_server(version)
            if server is None:
                continue
            if any(part not in self.work for part in evaluation.open_parts):  # of a run that was resumed
                self._close(version, "data.eval or evaluation were changed before it was done")
                continue
            record(self.run, "evaluating", {"version": version, "server": server})
            self._ask(evaluation, evaluation.open_parts)

    def _ask(self, evaluation: Evaluation, parts: Iterable[EvaluationPart]) -> None:
        """Have its server do these; where it does that already, or has done it, nothing begins anew."""
        for work in (self.work[part] for part in parts if part in self.work):
            self.peers.send(str(evaluation.server), work.lease(evaluation.version, self.run.config.run.seed))

    def _release(self, peer: Peer, version: int) -> None:
        """A server need not hold a version whose evaluation is closed."""
        if version in self.board.closed:
            self.peers.send(peer.identity, m.EvaluationClosed(version=version))

    def _resend(self) -> None:
        """Ask again for what the server that shall do it does not hold (replay/channel/delivery.py)."""
        for evaluation in self.board.open.values():
            if (peer := self.peers.get(evaluation.server or "")) is not None:
                lacks = [each for each in evaluation.open_parts if peer.inventory.lacks((evaluation.version, *each))]
                self._ask(evaluation, lacks)

    def inventory(self, peer: Peer, held: Sequence[Sequence[int | str | bool]]) -> None:
        """What a server says to hold: results that have not come, and what it has not heard to be closed."""
        for each in held:
            if len(each) != 5 or not isinstance(each[0], int):
                continue
            version, part, is_done = each[0], EvaluationPart.of(each[1:4]), each[4]
            self._release(peer, version)
            evaluation = self.board.open.get(version)
            # Where its result was lost, it is the answer, and nothing begins anew.
            if evaluation is not None and evaluation.server == peer.identity and is_done:
                self._ask(evaluation, [part] if part in evaluation.open_parts else [])

    def result(self, peer: Peer, result: m.EvaluationResult, frames: Frames = ()) -> None:
        version, part = result.version, EvaluationPart(result.set, result.greedy, result.first)
        work = self.work.get(part)
        if work is not None and result.asked != work.fingerprint:  # what is asked for now was said when it joined
            log.warning(
                "replay: %r evaluated version %d with prompts or settings of before a restart", peer.name, version
            )
            return
        if problem := problem_with_evaluation(result, work):
            log.warning("replay: evaluation of version %d by %r rejected: %s [corrupt]", version, peer.name, problem)
            self._failed_at(peer, version)
            return
        if not self.board.wants(peer.identity, version, part):
            return
        fields = {"version": version, "greedy": result.greedy, "set": result.set, "first": result.first}
        fields["asked"] = result.asked
        record(self.run, "evaluated", fields, frames or encode(result, "", 0))
        self._tell(version, result)
        if not self.board.open[version].open_parts:
            self._close(version, "")

    def failed(self, peer: Peer, message: m.EvaluationFailed) -> None:
        """The server that runs it could not; another may."""
        log.warning("replay: %r could not evaluate version %d: %s", peer.name, message.version, message.reason)
        self._failed_at(peer, message.version)

    def give_up(self) -> None:
        """Close what no server can do: a version comes to it once, and all are past one that none was asked for."""
        servers = self.peers.role("rollout_server")
        on_line = [peer.version for peer in servers if not self.run.policies.is_lost(peer.policy)]
        if not servers or len(on_line) < len(servers):
            return
        for version in self.board.out_of_reach(min(on_line), {peer.identity for peer in servers}):
            reason = "no server holds that version any more"
            log.warning("replay: evaluation of version %d given up: %s", version, reason)
            self._close(version, reason)

    def expire(self, now: float) -> list[int]:
        """Give up those that take too long; their versions. Resend what servers lack."""
        self._resend()
        overdue = self.board.overdue(now)
        for version, reason in overdue:
            log.warning("replay: evaluation of version %d given up: %s [slow]", version, reason)
            self._close(version, reason)
        return [version for version, _ in overdue]

    def superseded(self, version: int) -> None:
        """Policies from `version` on are about to be lost: their successors are evaluated when the learner asks."""
        for lost in self.board.known_from(version):
            self.withheld.discard(lost)
            self.peers.to_servers(m.EvaluationClosed(version=lost, reason="its policy is not on the line"))

    def _asks_for_other_answers(self, version: int) -> bool:
        """Whether what the journal has of a version is not what would be asked for now."""
        results = self.board.results.get(version, {})
        is_whole = bool(results) and self.board.closed.get(version) == ""
        if is_whole and results.keys() != self.work.keys():
            return True
        asked = {part: work.fingerprint for part, work in self.work.items()}
        return any(result.asked != asked.get(part) for part, result in results.items())

    def _failed_at(self, peer: Peer, version: int) -> None:
        if self.board.failed(peer.identity, version):
            self._close(version, "every server that holds it failed")

    def _close(self, version: int, reason: str) -> None:
        record(self.run, "evaluation_closed", {"version": version, "reason": reason})
        closed = m.EvaluationClosed(version=version, reason=reason)
        self.peers.to_servers(closed)
        self._tell(version, closed)

    def _tell(self, version: int, news: m.EvaluationResult | m.EvaluationClosed) -> None:
        """The learner hears of a version once it has made it."""
        if version <= self.run.buffer.version:
            self.peers.to_rank(0, news)
        else:
            self.withheld.add(version)
