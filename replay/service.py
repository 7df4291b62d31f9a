"""What replay does with each message: the whole protocol, without sockets and with time as an argument.

`handle` and `tick` put answers into `outbox`; replay/serve.py carries them, once what they tell of is in the journal.
That makes the service a pure state machine that tests drive with any order of messages and any clock, and that
replay/journal/apply.py builds again from its journal.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from configs.schema import Config
from replay import messages as m
from replay.bounded_log import BoundedLog
from replay.channel import Message, WireError, may_be
from replay.desks.batch_desk import BatchDesk
from replay.desks.buffer import GroupBuffer
from replay.desks.evaluation_desk import EvaluationDesk
from replay.desks.incarnations import Incarnations
from replay.desks.lease_desk import LeaseDesk
from replay.desks.leases import GroupId
from replay.journal import Journal, JournalError, MemoryJournal
from replay.journal.format import Frames, Location
from replay.journal.snapshot import snapshot_of
from replay.peers import Peer, Peers, learner_keys, may_say
from replay.prompts import PromptSource
from replay.status import batch_stats, status_of

log = logging.getLogger(__name__)


class Service:
    """The only owner of the prompt cursor, the leases, the buffer and the journal."""

    def __init__(
        self,
        config: Config,
        source: PromptSource,
        evaluation_rows: Sequence[dict[str, Any]],
        now: float,
        *,
        fingerprint: Mapping[str, str] | None = None,
        journal: Journal | None = None,
        playback: bool = False,
    ) -> None:
        """Start anew.

        Args:
            config: of the run.
            source: prompts.
            evaluation_rows: prompts of evaluations.
            now: monotonic seconds.
            fingerprint: what every peer must agree on.
            journal: where decisions go; none keeps them in memory.
            playback: only take again what the journal has (`--replay`): no prompts, no servers, no evaluations.
        """
        expected = fingerprint or {}
        self.config, self.source, self.playback = config, source, playback
        self.journal: Journal = MemoryJournal() if journal is None else journal
        lag, on_stale = config.replay.async_lag, config.replay.on_stale
        self.buffer = GroupBuffer(config.rollout.groups_per_step, lag, on_stale, load=self.load_group)
        self.peers = Peers(expected)
        self.outbox: list[tuple[str, Message]] = []
        self.counters = self.buffer.counters
        fail, size = partial(self.end, failed=True), expected.get("vocab_size", "")
        self.desk = LeaseDesk(
            config,
            self.buffer,
            source,
            self.peers,
            journal=self.journal,
            vocab_size=int(size) if size.isdigit() else None,
            send=self._send,
            fail=fail,
        )
        self.batch_desk = BatchDesk(config, self.desk, self.peers, journal=self.journal, send=self._send, fail=fail)
        rows = [] if playback else evaluation_rows
        self.evaluations = EvaluationDesk(config, rows, self.buffer, self.peers, journal=self.journal, send=self._send)
        self.incarnations = Incarnations(self, now)
        self.no_server_since = now
        self.missing: dict[str, float] = {}
        """Servers that held leases when replay was restarted, and until when they have to come back."""
        self.unwritten_since: float | None = None
        """Since when the journal could not be written."""
        self.ended: str | None = None
        self.ended_at = 0.0
        self.failed = False
        self.learner_nodes = learner_keys(config)
        self._handlers = self._reactions()
        self._bounded = BoundedLog(log)

    def _reactions(self) -> dict[type[Message], Callable[[Peer, Any, float], None]]:
        """What follows from each message of an admitted peer; groups and results, which have frames, are apart."""
        return {
            m.Heartbeat: self._heartbeat,
            m.LeaseRequest: self._lease_request,
            m.Renew: self.desk.renew,
            m.Cancel: lambda peer, cancel, _: self.desk.failed(peer, cancel),
            m.EvaluationFailed: lambda peer, failed, _: self.evaluations.failed(peer, failed),
            m.Take: self.batch_desk.take,
            m.Committed: lambda _, committed, __: self._committed(committed),
            m.Published: lambda _, published, __: self.desk.newest(published.version),
            m.Evaluate: lambda _, evaluate, now: self.evaluations.request(evaluate.version, now),
            m.CursorRequest: self._cursor_request,
            m.Checkpointed: lambda _, checkpointed, __: self._checkpointed(checkpointed),
            m.Goodbye: self._goodbye,
        }

    @property
    def incarnation(self) -> int:
        """Starts of the learner so far."""
        return self.incarnations.number

    # ---- incoming -------------------------------------------------------------------------------------

    def handle(self, identity: str, message: Message, now: float) -> None:
        """Process one message of a peer, and what follows from it."""
        self.receive(identity, message, now)
        self.advance(now)

    def receive(self, identity: str, message: Message, now: float, *, frames: Frames = (), sender: str = "") -> None:
        """Process one message without handing anything out: many of them cost one `advance`.

        Args:
            identity: of the peer's socket.
            message: as decoded.
            now: monotonic seconds.
            frames: the message as it came, for the journal.
            sender: name of the key that the peer has proven; empty without keys.
        """
        if isinstance(message, m.Hello):
            self._hello(identity, message, now, sender)
            return
        if isinstance(message, m.StatusRequest):
            self._send(identity, m.Status(state=status_of(self, now)))
            return
        peer = self.peers.get(identity)
        if peer is None:
            self._send(identity, m.Refused(reason="say Hello first: replay does not know this peer (was it silent?)"))
            return
        peer.last_heard, peer.unreachable_since = now, None
        if not may_say(peer, message):
            self.counters["corrupt_messages"] += 1
        elif isinstance(message, m.Group):
            self.desk.group(peer, message, frames)
        elif isinstance(message, m.EvaluationResult):
            self.evaluations.result(peer, message, frames)
        elif (handler := self._handlers.get(type(message))) is not None:
            handler(peer, message, now)

    def corrupt(self, identity: str, problem: WireError) -> None:
        """A message that cannot be used: counted and named."""
        peer = self.peers.get(identity)
        symptom = getattr(problem, "symptom", "corrupt")
        self.counters[f"{symptom}_messages"] += 1
        name = peer.name if peer else identity[:40]
        self._bounded.warning(symptom, "replay: message of %s refused: %s [%s]", name, problem, symptom)
        if peer is None:  # it may speak another schema; one that was admitted sends again what is not acked
            self._send(identity, m.Refused(reason=f"message refused: {problem}"))

    def tick(self, now: float, *, late: bool = False) -> None:
        """What time alone causes: expired leases, silent peers, overdue evaluations, a run without servers.

        Args:
            now: monotonic seconds.
            late: replay itself was away (stopped, swapped out): its peers' silence is then its own.
        """
        self.desk.expire(now)
        if not late:
            for peer in self.peers.silent(now, self.config.network.silent_after_s):
                self.lost(peer.identity, "silent", now)
            self.incarnations.watch(now)
        for identity in [i for i, until in self.missing.items() if now > until]:
            del self.missing[identity]
            self.evaluations.board.server_lost(identity)
            held = self.desk.server_lost(identity)
            log.warning("replay: %s has not come back; its %d leases go to other servers [silent]", identity, held)
        self.evaluations.expire(now)
        self._watch_for_servers(now)
        self.advance(now)

    def unreachable(self, identity: str, now: float) -> None:
        """A send to this peer failed. A rollout server is lost; a learner rank has time to come back."""
        peer = self.peers.get(identity)
        if peer is None or peer.role != "learner":
            self.lost(identity, "closed", now)
        elif peer.unreachable_since is None:
            peer.unreachable_since = now

    def lost(self, identity: str, symptom: str, now: float) -> None:
        """A peer is gone: its leases and evaluations are free for others."""
        peer = self.peers.remove(identity)
        if peer is None:
            return
        self.evaluations.board.server_lost(identity)
        held = self.desk.server_lost(identity)
        if peer.role == "rollout_server" and self.ended is None:
            self.counters["servers_lost"] += 1
            log.warning(
                "replay: lost %s while it held %d leases, which go to other servers [%s]",
                peer.describe(now), held, symptom,
            )  # fmt: skip
        self.advance(now)

    def end(self, reason: str, *, failed: bool) -> None:
        """End the run: everyone is told once."""
        if self.ended is None:
            self.ended, self.failed, self.ended_at = reason, failed, time.monotonic()
            self.journal.append("end", {"reason": reason, "failed": failed})
            (log.error if failed else log.info)("replay: the run ends: %s", reason)
            for peer in list(self.peers.by_identity.values()):
                self._send(peer.identity, m.Goodbye(reason=reason, failed=failed))

    def sayable(self, now: float) -> list[tuple[str, Message]]:
        """What of the outbox may be sent now: all of it, once the journal has what it tells of. While that cannot be
        written it is only what promises nothing: the state that was asked for, and how the run ended."""
        if not self.outbox or self._is_written(now):
            may, self.outbox = self.outbox, []
            return may
        free = m.Status if self.ended is None else m.Goodbye | m.Status
        may = [item for item in self.outbox if isinstance(item[1], free)]
        self.outbox = [item for item in self.outbox if self.ended is None and not isinstance(item[1], free)]
        return may

    def _is_written(self, now: float) -> bool:
        try:
            self.journal.flush()
        except JournalError as error:
            if self.unwritten_since is None:
                self.unwritten_since = now
                self.counters["journal_full"] += 1
                log.error("replay: the journal waits for its disk, and nothing is acknowledged: %s [full]", error)
            if now - self.unwritten_since > (limit := self.config.learner.batch_deadline_s):
                self.end(f"replay waited {limit:g} s for the disk of its journal: {error} [full]", failed=True)
            return False
        if self.unwritten_since is not None:
            log.info("replay: the journal is written again after %.1f s", now - self.unwritten_since)
            self.unwritten_since = None
        return True

    def _heartbeat(self, peer: Peer, message: m.Heartbeat, now: float) -> None:
        peer.activity, peer.gauges = message.activity, message.gauges
        peer.since = now - message.since_s
        if peer.role == "rollout_server" and peer.incarnation < self.incarnation and self.ended is None:
            self._send(peer.identity, self.welcome())  # it may have missed that a learner has started

    def _lease_request(self, peer: Peer, message: m.LeaseRequest, now: float) -> None:
        peer.capacity, peer.version, peer.incarnation = message.capacity, message.version, message.incarnation
        if message.incarnation < self.incarnation:  # it may not have heard of the learner that is here now
            self._send(peer.identity, self.welcome())
        if not self.desk.is_on_line(peer):
            self.desk.off_line(peer)
        elif message.incarnation < self.incarnation or message.version <= self.buffer.version:
            self.evaluations.holds(peer, message.version)  # else its commit is still on the way; the wish comes again

    # ---- the learner ----------------------------------------------------------------------------------

    def _committed(self, message: m.Committed) -> None:
        expected = self.batch_desk.committed(message)
        if expected is not None:
            self.incarnations.diverged(message.step, expected, message.digest)
        self.evaluations.made(self.buffer.version)

    def cursor(self) -> dict[str, Any]:
        """State for a checkpoint: where the data stands, and which admitted prompts were not trained yet."""
        # Rank 0 asks between its commit and its next Take, so no batch is formed: nothing here was trained.
        ahead = [taken.group_id for step in self.buffer.line.ahead(self.buffer.version)
                 for taken in self.buffer.line.steps[step].groups]  # fmt: skip
        return {
            "incarnation": self.incarnation,
            "version": self.buffer.version,
            "source": self.source.state(),
            "untrained": [list(g) for g in [*ahead, *self.buffer.slots, *self.desk.again]],
            "counters": dict(self.counters),
        }

    def _cursor_request(self, peer: Peer, request: m.CursorRequest, _: float) -> None:
        if request.step != self.buffer.version:
            reason = (
                f"say Hello first: replay is at version {self.buffer.version}, the commit of {request.step} was lost"
            )
            self._send(peer.identity, m.Refused(reason=reason))
            return
        self.journal.want_sync()  # a durable checkpoint must not be ahead of the journal
        self._send(peer.identity, m.Cursor(step=request.step, state=self.cursor()))

    def _checkpointed(self, message: m.Checkpointed) -> None:
        """What no kept checkpoint needs is not kept either."""
        self.counters["checkpoints"] += 1
        oldest = min(message.kept, default=message.step)
        self.journal.append("checkpoint", {"step": message.step, "kept": list(message.kept)})
        self.buffer.line.forget(oldest)
        self.evaluations.forget(oldest)
        try:
            self.journal.begin_segment()
            self.journal.append("snapshot", snapshot_of(self))
            self.journal.want_sync()
            self.journal.flush()  # before the files that it takes the place of are gone
        except JournalError as error:
            log.error("replay: no journal file was freed: %s [full]", error)
            return
        if self.config.replay.journal_keep == "checkpoint" and not self.playback:
            self.journal.release(self.first_segment())

    def first_segment(self) -> int:
        """Number of the oldest file of the journal that is still needed."""
        held = [slot.location.segment for slot in self.buffer.slots.values() if slot.location is not None]
        others = [self.buffer.line.first_segment(), self.evaluations.first_segment()]
        return min([self.journal.segment, *held, *(segment for segment in others if segment is not None)])

    # ---- peers ----------------------------------------------------------------------------------------

    def _hello(self, identity: str, hello: m.Hello, now: float, sender: str) -> None:
        problem = self._may_be(hello, sender) or self.peers.disagreement(hello)
        known = self.peers.get(identity) is not None
        if problem is None and hello.role == "learner" and not known:
            problem = self.incarnations.hello(identity, hello, now)
        if problem is not None:
            self.counters["peers_refused"] += 1
            log.error("replay: refused %r (pid %d on %s): %s", hello.name, hello.pid, hello.host, problem)
            self._send(identity, m.Refused(reason=problem))
            return
        peer = self.peers.add(identity, hello, now)
        self.missing.pop(identity, None)
        if not known:
            log.info("replay: %s %s joined", peer.role, peer.describe(now))
        if self.ended is not None:
            self._send(identity, m.Goodbye(reason=self.ended, failed=self.failed))
        self._send(identity, self.welcome())
        if hello.role == "rollout_server":
            self.evaluations.joined(peer)

    def _may_be(self, hello: m.Hello, sender: str) -> str | None:
        """Only the learner's own node speaks for the run; ranks above 0 may be of the other learner nodes."""
        above_0 = hello.role == "learner" and hello.rank > 0
        return may_be(hello.role, sender, self.learner_nodes if above_0 else ())

    def welcome(self) -> m.Welcome:
        """The run as a newcomer needs it."""
        line, address = self.buffer.line, self.incarnations.bus_address
        return m.Welcome(
            incarnation=self.incarnation,
            version=self.buffer.version,
            bus_address=address,
            resumes_until=line.last_committed,
        )

    def _goodbye(self, peer: Peer, message: m.Goodbye, now: float) -> None:
        self._send(peer.identity, m.Goodbye(reason="goodbye"))
        if peer.role == "learner" and (peer.hello.rank == 0 or message.failed):
            self.end(message.reason, failed=message.failed)
        elif peer.role == "rollout_server":
            self.lost(peer.identity, "closed", now)

    def _watch_for_servers(self, now: float) -> None:
        waits = self.incarnation > 0 and self.ended is None and not self.playback
        if not waits or self.peers.role("rollout_server") or not self.incarnations.learner_is_here:
            self.no_server_since = now
        elif now - self.no_server_since > self.config.rollout.wait_for_servers_s:
            waited = self.config.rollout.wait_for_servers_s
            self.end(f"no rollout server for {waited:g} s (rollout.wait_for_servers_s) [silent]", failed=True)

    def advance(self, now: float) -> None:
        """Hand out what can be handed out: leases, evaluations, the batch that the ranks ask for."""
        if self.ended is not None or self.incarnation == 0:
            return
        self.evaluations.assign()
        if not self.playback:
            self.desk.grant(now)
        self.batch_desk.form(partial(batch_stats, self))

    def restart_at(self, version: int, again: deque[GroupId]) -> None:
        """Forget all groups; the prompts of `again` are leased before the source goes on.

        Raises:
            JournalError: the journal could not take the new state.
        """
        self.buffer.slots.clear()
        self.buffer.line.steps.clear()
        self.buffer.line.initial = None
        self.buffer.version, self.buffer.formed = version, None
        self.desk.again = again
        self.journal.begin_segment()
        self.journal.append("snapshot", snapshot_of(self))

    def load_group(self, location: Location) -> m.Group:
        """A group from the journal."""
        group = self.journal.read(location)
        assert isinstance(group, m.Group)
        return group

    def _send(self, identity: str, message: Message) -> None:
        self.outbox.append((identity, message))
