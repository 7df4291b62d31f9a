"""What replay does with each message: the whole protocol, without sockets and with time as an argument.

A pure state machine that tests drive with any order of messages and any clock: `handle` and `tick` put answers into
`outbox`. replay/state/apply.py builds its state again from the journal.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from configs.loading import dump
from configs.schema import Config
from replay import messages as m
from replay.channel import Message, WireError, may_be, shown
from replay.data import PromptSource, Row
from replay.decisions.batching import BatchScheduler
from replay.decisions.evaluating import EvaluationScheduler
from replay.decisions.incarnations import Incarnations
from replay.decisions.intake import GroupIntake
from replay.decisions.leasing import LeaseScheduler
from replay.decisions.making import GroupMaker
from replay.decisions.teaching import TeacherDirectory
from replay.endings import NoServer
from replay.journal import Journal
from replay.journal.format import Frames, Record
from replay.outlet import Outlet
from replay.state.apply import record, restore
from replay.state.evaluation_parts import parts_of
from replay.state.leases import SlotState
from replay.state.peers import Peer, Peers, learner_keys
from replay.state.run import RunState
from replay.state.snapshot import snapshot_of
from replay.status import StatusReport
from replay.timeline import ENDED, Timeline
from slipstream.runtime.hang import expired
from slipstream.runtime.lifeline import BoundedLog

log = logging.getLogger(__name__)

Handler = Callable[[Peer, Any, float, Frames], None]  # (peer, message, now, frames)


class Service:
    """The only owner of the prompt cursor, the leases, the buffer and the journal."""

    def __init__(
        self,
        config: Config,
        source: PromptSource,
        evaluation_rows: Mapping[str, Sequence[Row]],
        now: float,
        *,
        journal: Journal,
        fingerprint: Mapping[str, str] | None = None,
        playback: bool = False,
    ) -> None:
        """Start anew, at `now` in monotonic seconds, with the prompts of each set that is evaluated.

        Every peer must have the `fingerprint`. With `playback` (`--replay`) replay only takes again what the journal
        has: no prompts, no servers, no evaluations.
        """
        work = {} if playback else parts_of(config.evaluation_sets, evaluation_rows)
        self.config, self.journal, self.playback = config, journal, playback
        self.run = run = RunState(config, source, journal, parts=work)
        self.buffer, self.counters = run.buffer, run.counters
        self.peers = peers = Peers(fingerprint or {})
        self.outbox, self._send = peers.outbox, peers.send
        fail = partial(self.end, failed=True)
        self.leasing = LeaseScheduler(run, peers, fail=fail)
        makes = config.learner.facts.from_data and not playback
        self.making = GroupMaker(run, self.leasing) if makes else None
        """Where groups come from data.train."""
        self.intake = GroupIntake(run, peers, self.leasing, fail=fail)
        self.batching = BatchScheduler(run, peers, self.leasing, fail=fail)
        self.evaluations = EvaluationScheduler(run, peers, work)
        self.incarnations = Incarnations(
            run, peers, self.leasing, self.batching, self.evaluations, playback=playback, fail=fail,
            expired=self._expired, now=now,
        )  # fmt: skip
        self.teaching = TeacherDirectory(run, peers, fail=fail, now=now)
        self.report = StatusReport(run, peers, self.leasing, self.intake, self.batching, self.teaching)
        self.outlet = Outlet(journal, peers.outbox, self.report.waits, run.counters, fail)
        self.timeline: Timeline | None = None
        """Set where the run has a folder (replay/main.py)."""
        self.no_server_since = now
        self.missing: dict[str, float] = {}
        """Servers that held leases when replay was restarted, and until when they have to come back."""
        self.ended: str | None = None
        self.ended_at = 0.0
        self.failed = False
        self.learner_nodes = learner_keys(config)
        self._bounded = BoundedLog(log)
        self._handlers = self._dispatch_table()

    def _dispatch_table(self) -> dict[type[Message], Handler]:
        """What follows from each kind of an admitted peer's message."""
        leasing, intake, evaluations = self.leasing, self.intake, self.evaluations
        return {
            m.Heartbeat: self._heartbeat,
            m.Goodbye: self._goodbye,
            m.LeaseRequest: self._lease_request,
            m.Renew: self._renew,
            m.Cancel: lambda peer, cancel, _, __: intake.failed(peer, cancel),
            m.Group: lambda peer, group, _, frames: intake.group(peer, group, frames),
            m.EvaluationResult: lambda peer, result, _, frames: evaluations.result(peer, result, frames),
            m.EvaluationFailed: lambda peer, failed, _, __: evaluations.failed(peer, failed),
            m.Take: lambda peer, take, now, _: self.batching.take(peer, take, now),
            m.Committed: self._committed,
            m.Published: self._published,
            m.Evaluate: lambda _, evaluate, now, __: evaluations.request(evaluate.version, now),
            m.CursorRequest: self._cursor_request,
            m.Checkpointed: self._checkpointed,
            m.LowerLag: lambda _, lower, __, ___: leasing.lower_lag(lower),
        }

    @property
    def incarnation(self) -> int:
        return self.run.policies.incarnation

    def restore(self, records: Iterable[Record], now: float) -> int:
        """Go to where a journal ends; how many records there were. Raises JournalError.

        Servers that were there keep their leases, so that their running answers count when they come back.
        """
        count = restore(self.run, records, now)
        until = now + self.config.network.silent_after_s
        leased = [slot for slot in self.buffer.slots.values() if slot.state is SlotState.LEASED]
        for slot in leased:
            # Soon: replay may have died before the server heard of this lease. Its next Renew sets the usual deadline.
            slot.deadline, slot.progress_at = until, now
        servers = [slot.server for slot in leased] + [e.server for e in self.run.board.open.values()]
        self.missing = {server: until for server in servers if server is not None}
        self.incarnations.settle()
        return count

    def handle(self, identity: str, message: Message, now: float) -> None:
        """Process one message of a peer, and what follows from it."""
        self.receive(identity, message, now)
        self.advance(now)

    def receive(self, identity: str, message: Message, now: float, *, frames: Frames = (), sender: str = "") -> None:
        """Process one message without handing anything out: many of them cost one `advance`.

        `frames` are the message as it came, for the journal; `sender` is the name of the key that the peer has proven.
        """
        if isinstance(message, m.Hello):
            self._hello(identity, message, now, sender)
            return
        if isinstance(message, m.StatusRequest):
            self._send(identity, m.Status(state=self._state(now, message)))
            return
        peer = self.peers.get(identity)
        if peer is None:
            self._send(identity, m.Refused(code="hello", reason="replay does not know this peer (was it silent?)"))
            return
        peer.last_heard, peer.unreachable_since = now, None
        if not isinstance(message, m.Heartbeat):
            peer.last_acted = now
        if peer.may_send(message):
            self._handlers[type(message)](peer, message, now, frames)
            return
        self.counters["corrupt_messages"] += 1
        kind = type(message).__name__
        self._bounded.warning("role", "replay: %r is a %s and may not send %s [corrupt]", peer.name, peer.role, kind)

    def corrupt(self, identity: str, problem: WireError) -> None:
        """A message that cannot be used: counted and named."""
        peer, symptom = self.peers.get(identity), problem.symptom
        self.counters[f"{symptom}_messages"] += 1
        name = peer.name if peer else shown(identity)
        self._bounded.warning(symptom, "replay: message of %s refused: %s [%s]", name, problem, symptom)
        if peer is None:  # it may speak another schema; one that was admitted sends again what is not acked
            self._send(identity, m.Refused(code="message", reason=f"message refused: {problem}"))

    def tick(self, now: float, *, late: bool = False) -> None:
        """What time alone causes: expired leases, silent peers, overdue evaluations, a run without servers.

        `late` says that replay itself was away (stopped, swapped out): its peers' silence is then its own.
        """
        if late_holders := self.leasing.expire(now):
            self._say_hung("leases", late_holders, self.config.replay.lease_s, "replay.lease_s")
        if not late:
            for peer in (*self.peers.role("rollout_server"), *self.peers.role("teacher")):
                if now - peer.last_heard > self.config.network.silent_after_s:
                    self.lost(peer.identity, "silent", now)
            self.incarnations.watch(now, has_ended=self.ended is not None)
        for identity in [i for i, until in self.missing.items() if now > until]:
            del self.missing[identity]
            held = self.leasing.server_lost(identity)
            log.warning("replay: %s is not back; its %d leases go to other servers [silent]", shown(identity), held)
        if not self.missing:
            self.evaluations.give_up()
        for version in self.evaluations.expire(now):
            key, limit_s = "evaluation.deadline_s", self.config.evaluation.deadline_s
            self._say_hung(f"the evaluation of version {version}", [], limit_s, key)
        self._watch_for_servers(now)
        self.advance(now)

    def unreachable(self, identity: str, now: float) -> None:
        """A send to this peer failed. A rollout server is lost; a learner rank has time to come back."""
        peer = self.peers.get(identity)
        if peer is None or peer.role != "learner":
            self.lost(identity, "closed", now)
        elif peer.unreachable_since is None:
            peer.unreachable_since = now

    def reached(self, identity: str) -> None:
        """A send to this peer was taken: a learner rank that computes says nothing when its connection is back."""
        if (peer := self.peers.get(identity)) is not None:
            peer.unreachable_since = None

    def lost(self, identity: str, symptom: str, now: float) -> None:
        """A peer is gone: its leases and evaluations are free for others."""
        peer, said = self.peers.get(identity), ""
        if peer is None:
            return
        counts = peer.role in ("rollout_server", "teacher") and self.ended is None
        if counts and symptom == "silent":  # first: the report says what it owes
            owes = "holds leases" if peer.role == "rollout_server" else "scores groups"
            what, key = f"a sign of {peer.name}, which {owes}", "network.silent_after_s"
            said = self._expired(what, (peer.name,), now - peer.last_heard, key)
            self.peers.silent[peer.name] = peer.hello
        self.peers.remove(identity)
        self.peers.gone[identity] = symptom if self.ended is None else ENDED
        if peer.role == "teacher":
            self.teaching.changed()
            if counts:
                self.counters["teachers_lost"] += 1
                log.warning("replay: lost teacher %s%s [%s]", peer.describe(now), said, symptom)
            return
        held = self.leasing.server_lost(identity)
        if counts:
            self.counters["servers_lost"] += 1
            log.warning(
                "replay: lost %s while it held %d leases, which go to other servers%s [%s]",
                peer.describe(now), held, said, symptom,
            )  # fmt: skip
        self.advance(now)

    def end(self, reason: str, *, failed: bool) -> None:
        """End the run: everyone is told once."""
        if self.ended is None:
            self.ended, self.failed, self.ended_at = reason, failed, time.monotonic()
            self.journal.append("end", {"reason": reason, "failed": failed})
            (log.error if failed else log.info)("replay: the run ends: %s", reason)
            for identity in self.peers.by_identity:
                self._send(identity, m.Goodbye(reason=reason, failed=failed))

    def sayable(self, now: float) -> list[tuple[str, Message]]:
        """What may be sent now: replay/outlet.py has the rule."""
        return self.outlet.sayable(now, has_ended=self.ended is not None)

    def _heartbeat(self, peer: Peer, message: m.Heartbeat, now: float, _: Frames) -> None:
        peer.activity, peer.blocked, peer.gauges = message.activity, message.blocked, message.gauges or peer.gauges
        peer.since = now - message.since_s
        if peer.role == "rollout_server":
            self.report.note_beat(message.gauges)
            if peer.incarnation < self.incarnation and self.ended is None:
                self._send(peer.identity, self.run.welcome())  # it may have missed that a learner has started
        elif peer.role == "teacher":
            self.teaching.beat(peer)

    def _lease_request(self, peer: Peer, message: m.LeaseRequest, _: float, __: Frames) -> None:
        peer.capacity, peer.version, peer.incarnation = message.capacity, message.version, message.incarnation
        if message.incarnation < self.incarnation:  # it may not have heard of the learner that is here now
            self._send(peer.identity, self.run.welcome())
        if not self.leasing.is_on_line(peer):
            self.leasing.off_line(peer)
        elif message.incarnation < self.incarnation or message.version <= self.buffer.version:
            self.evaluations.holds(peer, message.version)  # else its commit is still on the way; the wish comes again

    def _renew(self, peer: Peer, message: m.Renew, now: float, _: Frames) -> None:
        self.leasing.renew(peer, message, now)
        self.intake.finished(peer, message.finished)
        self.evaluations.inventory(peer, message.evaluations)

    def _published(self, _: Peer, message: m.Published, now: float, __: Frames) -> None:
        self.run.policies.possible(message.version)
        self.report.latency.announced(message.version, now)

    def _committed(self, _: Peer, message: m.Committed, __: float, ___: Frames) -> None:
        self.batching.committed(message)
        self.intake.early.clear()
        self.incarnations.settle()
        self.evaluations.made(self.buffer.version)
        self.teaching.changed()

    def cursor(self) -> dict[str, Any]:
        """State for a checkpoint: where the data stands, and which admitted prompts were not trained yet."""
        # Rank 0 asks between its commit and its next Take, so no batch is formed: nothing here was trained.
        ahead = [taken.group_id for taken in self.buffer.line.groups_ahead(self.buffer.version)]
        return {
            "incarnation": self.incarnation,
            "version": self.buffer.version,
            "source": self.run.source.state(),
            "untrained": [list(g) for g in [*ahead, *self.buffer.slots, *self.run.again]],
            "counters": dict(self.counters),
        }

    def _cursor_request(self, peer: Peer, request: m.CursorRequest, now: float, _: Frames) -> None:
        if request.step != self.buffer.version:
            lost = f"replay is at version {self.buffer.version}, the commit of {request.step} was lost"
            self._send(peer.identity, m.Refused(code="hello", reason=lost))
            return
        # a durable checkpoint must not be ahead of the journal
        self.outlet.say_once_on_disk(peer.identity, m.Cursor(step=request.step, state=self.cursor()), now)

    def _checkpointed(self, _: Peer, message: m.Checkpointed, __: float, ___: Frames) -> None:
        """A checkpoint is durable: files of the journal that no kept one needs are freed behind a snapshot."""
        record(self.run, "checkpoint", {"step": message.step, "kept": list(message.kept)})
        if (problem := self.journal.problem) is not None:
            log.error("replay: no journal file is freed: %s [full]", problem)
            return
        self.journal.begin_segment()
        self.journal.append("snapshot", snapshot_of(self.run))
        self.journal.want_sync()
        if self.config.replay.journal_keep == "checkpoint" and not self.playback:
            self.journal.release(self.run.first_segment())

    def _hello(self, identity: str, hello: m.Hello, now: float, sender: str) -> None:
        # Only the learner's own node speaks for the run; ranks above 0 may be of the other learner nodes.
        nodes = self.learner_nodes if hello.role == "learner" and hello.rank > 0 else ()
        problem = may_be(hello.role, sender, nodes) or self.peers.disagreement(hello)
        known = self.peers.get(identity) is not None
        if problem is None and hello.role == "teacher":
            problem = self.teaching.problem(hello)
        if problem is None and hello.role == "learner" and not known:
            problem = self.incarnations.hello(identity, hello)
        if problem is not None:
            self.counters["peers_refused"] += 1
            log.error("replay: refused %r (pid %d on %s): %s", hello.name, hello.pid, hello.host, problem)
            self._send(identity, m.Refused(reason=problem))
            return
        for old in self.peers.role("teacher") if hello.role == "teacher" else ():
            if old.name == hello.name and old.identity != identity:  # started again
                self.lost(old.identity, "closed", now)
        peer = self.peers.add(identity, hello, now)
        self.missing.pop(identity, None)
        self.missing |= {old: now for old in self.missing if old.rpartition(".")[0] == hello.name}  # replaced
        if not known:
            log.info("replay: %s %s joined", peer.role, peer.describe(now))
        if self.ended is not None:
            self._send(identity, m.Goodbye(reason=self.ended, failed=self.failed))
        self._send(identity, self.teaching.welcome(peer) if hello.role == "teacher" else self.run.welcome())
        if hello.role == "learner" and hello.rank == 0:
            self.teaching.learner_started(hello)
        self.teaching.changed(peer if hello.role == "rollout_server" else None)
        if hello.role == "rollout_server":
            self.evaluations.joined(peer)
        self.batching.joined(hello)

    def _goodbye(self, peer: Peer, message: m.Goodbye, now: float, _: Frames) -> None:
        self._send(peer.identity, m.Goodbye(reason="goodbye"))
        if peer.role == "learner" and (peer.hello.rank == 0 or message.failed):
            self.end(message.reason, failed=message.failed)
        elif peer.role == "learner":  # rank 0 may still wait for evaluations
            self.peers.remove(peer.identity)
            self.peers.gone[peer.identity] = message.reason
        elif peer.role in ("rollout_server", "teacher"):
            self.lost(peer.identity, "closed", now)

    def _watch_for_servers(self, now: float) -> None:
        waits = self.incarnation > 0 and self.ended is None and not self.playback and self.config.needs_servers
        self.teaching.watch(now, runs=waits and bool(self.peers.rank(0)))
        if not waits or self.peers.role("rollout_server") or not self.peers.rank(0):
            self.no_server_since = now
        elif now - self.no_server_since > (waited := self.config.rollout.wait_for_servers_s):
            said = self._expired("a rollout server", (), waited, "rollout.wait_for_servers_s")
            text = f"no rollout server for {waited:g} s (rollout.wait_for_servers_s); their logs end with the reason"
            self.end(str(NoServer(f"{text}{said} [silent]")), failed=True)

    def _expired(self, what: str, owed_by: Sequence[str], waited_s: float, key: str) -> str:
        """Report a wait of replay that was too long, in a thread of its own; what to add to the message."""
        state = partial(self._state, time.monotonic(), m.StatusRequest())
        return expired(what, owed_by=owed_by, waited_s=waited_s, key=key, status=state, ends=False)

    def _say_hung(self, what: str, owed_by: Sequence[str], waited_s: float, key: str) -> None:
        if said := self._expired(what, owed_by, waited_s, key):
            self._bounded.warning("hung", "replay: waited %g s for %s (%s)%s [slow]", waited_s, what, key, said)

    def _state(self, now: float, asked: m.StatusRequest) -> dict[str, Any]:
        if asked.about == "config":
            return {"config": dump(self.config)}
        if asked.about == "clock":
            return {"unix_s": time.time()}
        return {**self.report.of(now, ended=self.ended, no_server_since=self.no_server_since), "failed": self.failed}

    def advance(self, now: float) -> None:
        """Hand out what can be handed out: leases, evaluations, the batch that the ranks ask for."""
        if self.ended is not None or self.incarnation == 0:
            return
        self.evaluations.assign()
        if self.making is not None:
            self.making.fill(now)
        elif not self.playback:
            self.leasing.grant(now)
        self.report.look_for_updates(now)
        self.batching.form(self.report.of_batch, now)
