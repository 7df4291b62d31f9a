"""What replay does with each message: the whole protocol, without sockets and with time as an argument.

`handle` and `tick` put answers into `outbox`; replay/serve.py carries them. That makes the service a pure
state machine that tests drive with any order of messages and any clock.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from configs.schema import Config
from replay import messages as m
from replay.batch_desk import BatchDesk
from replay.buffer import GroupBuffer
from replay.channel import Message
from replay.evaluations import EvaluationBoard
from replay.lease_desk import LeaseDesk, stream_seed
from replay.leases import SlotState
from replay.peers import Peer, Peers
from replay.prompts import PromptSource
from replay.status import status_of
from replay.validation import problem_with_evaluation

log = logging.getLogger(__name__)


class Service:
    """The only owner of the prompt cursor, the leases and the buffer."""

    def __init__(
        self,
        config: Config,
        source: PromptSource,
        evaluation_rows: list[dict[str, Any]],
        now: float,
        *,
        fingerprint: Mapping[str, str] | None = None,
    ) -> None:
        expected = fingerprint or {}
        self.config = config
        self.source = source
        self.evaluation_rows = evaluation_rows[: config.evaluation.num_prompts]
        self.buffer = GroupBuffer(config.rollout.groups_per_step, config.replay.async_lag, config.replay.on_stale)
        self.peers = Peers(expected)
        wanted = {True: config.evaluation.greedy, False: config.evaluation.sampled}
        modes = [greedy for greedy, on in wanted.items() if on]
        self.evaluations = EvaluationBoard(modes if evaluation_rows else [], config.evaluation.deadline_s)
        self.outbox: list[tuple[str, Message]] = []
        self.counters = self.buffer.counters
        self.incarnation = 0
        self.bus_address: str | None = None
        fail = partial(self.end, failed=True)
        size = expected.get("vocab_size", "")
        self.desk = LeaseDesk(
            config,
            self.buffer,
            source,
            self.peers,
            vocab_size=int(size) if size.isdigit() else None,
            send=self._send,
            fail=fail,
        )
        self.batch_desk = BatchDesk(config, self.buffer, self.peers, send=self._send, fail=fail)
        self.no_server_since = now
        self._handlers: dict[type[Message], Callable[[Peer, Any, float], None]] = {
            m.Heartbeat: self._heartbeat,
            m.LeaseRequest: self._lease_request,
            m.Renew: self.desk.renew,
            m.Group: lambda peer, group, _: self.desk.group(peer, group),
            m.Cancel: lambda peer, cancel, _: self.desk.failed(peer, cancel),
            m.EvaluationResult: lambda peer, result, _: self._evaluation_result(peer, result),
            m.EvaluationFailed: lambda peer, failed, _: self._evaluation_failed(peer, failed),
            m.Take: self.batch_desk.take,
            m.Committed: lambda _, committed, __: self.batch_desk.committed(committed),
            m.Published: lambda _, published, __: self.desk.newest(published.version),
            m.Evaluate: lambda _, evaluate, now: self.evaluations.request(evaluate.version, now),
            m.CursorRequest: lambda peer, request, _: self._send(
                peer.identity, m.Cursor(step=request.step, state=self.cursor())
            ),
            m.Checkpointed: lambda _, __, ___: self.counters.update(checkpoints=1),
            m.Goodbye: self._goodbye,
        }
        self.ended: str | None = None
        self.ended_at = 0.0
        self.failed = False

    # ---- incoming -------------------------------------------------------------------------------------

    def handle(self, identity: str, message: Message, now: float) -> None:
        """Process one message of a peer, and what follows from it."""
        self.receive(identity, message, now)
        self.advance(now)

    def receive(self, identity: str, message: Message, now: float) -> None:
        """Process one message without handing anything out: many of them cost one `advance`."""
        if isinstance(message, m.Hello):
            self._hello(identity, message, now)
            return
        if isinstance(message, m.StatusRequest):
            self._send(identity, m.Status(state=status_of(self, now)))
            return
        peer = self.peers.get(identity)
        if peer is None:
            self._send(identity, m.Refused(reason="say Hello first: replay does not know this peer (was it silent?)"))
            return
        peer.last_heard, peer.unreachable_since = now, None
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(peer, message, now)

    def corrupt(self, identity: str, problem: str) -> None:
        """A message that did not decode: counted and named, never used."""
        peer = self.peers.get(identity)
        self.counters["corrupt_messages"] += 1
        log.warning("replay: message of %s refused: %s [corrupt]", peer.name if peer else identity[:40], problem)
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
            self._watch_the_learner(now)
        for version, reason in self.evaluations.overdue(now):
            log.warning("replay: evaluation of version %d given up: %s [slow]", version, reason)
            self.counters["evaluations_given_up"] += 1
            self._evaluation_closed(version, reason)
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
        self.evaluations.server_lost(identity)
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
            (log.error if failed else log.info)("replay: the run ends: %s", reason)
            for peer in list(self.peers.by_identity.values()):
                self._send(peer.identity, m.Goodbye(reason=reason, failed=failed))

    def cursor(self) -> dict[str, Any]:
        """State for a checkpoint: where the data stands, and which admitted prompts were not trained yet."""
        # Rank 0 asks between its commit and its next Take, so no batch is formed: nothing here was trained.
        untrained = list(self.buffer.slots)
        return {
            "incarnation": self.incarnation,
            "version": self.buffer.version,
            "source": self.source.state(),
            "untrained": [list(g) for g in [*untrained, *self.desk.again]],
            "counters": dict(self.counters),
        }

    def _heartbeat(self, peer: Peer, message: m.Heartbeat, now: float) -> None:
        peer.activity, peer.gauges = message.activity, message.gauges
        peer.since = now - message.since_s

    def _lease_request(self, peer: Peer, message: m.LeaseRequest, now: float) -> None:
        peer.capacity, peer.version = message.capacity, message.version
        self.evaluations.holds(peer.identity, message.version)
        if message.version in self.evaluations.closed:  # it got the version after everybody was told
            self._send(peer.identity, m.EvaluationClosed(version=message.version))

    def _evaluation_failed(self, peer: Peer, message: m.EvaluationFailed) -> None:
        log.warning("replay: %r could not evaluate version %d: %s", peer.name, message.version, message.reason)
        self._evaluation_failed_at(peer, message.version)

    def _evaluation_failed_at(self, peer: Peer, version: int) -> None:
        if self.evaluations.failed(peer.identity, version):
            self.counters["evaluations_given_up"] += 1
            self._evaluation_closed(version, self.evaluations.closed[version])

    # ---- peers ----------------------------------------------------------------------------------------

    def _hello(self, identity: str, hello: m.Hello, now: float) -> None:
        problem = self.peers.disagreement(hello)
        if problem is not None:
            self.counters["peers_refused"] += 1
            log.error("replay: refused %r (pid %d on %s): %s", hello.name, hello.pid, hello.host, problem)
            self._send(identity, m.Refused(reason=problem))
            return
        known = self.peers.get(identity) is not None
        if hello.role == "learner" and hello.rank == 0 and not known:
            problem = self._learner_started(hello)
            if problem is not None:
                log.error("replay: refused %r (pid %d on %s): %s", hello.name, hello.pid, hello.host, problem)
                self._send(identity, m.Refused(reason=problem))
                return
        peer = self.peers.add(identity, hello, now)
        if not known:
            log.info("replay: %s %s joined", peer.role, peer.describe(now))
        if self.ended is not None:
            self._send(identity, m.Goodbye(reason=self.ended, failed=self.failed))
        self._send(identity, self._welcome())
        if hello.role == "rollout_server":
            for version in self.evaluations.closed:  # it may hold one of them, from before it was silent
                self._send(identity, m.EvaluationClosed(version=version))

    def _welcome(self) -> m.Welcome:
        return m.Welcome(incarnation=self.incarnation, version=self.buffer.version, bus_address=self.bus_address)

    def _learner_started(self, hello: m.Hello) -> str | None:
        """A learner begins an incarnation: the line of policies goes on from its version. Or why it may not."""
        if self.incarnation > 0:
            return "this replay has served a learner before; start replay anew with it (the launcher's --resume does)"
        cursor = hello.cursor
        try:
            self.incarnation = (int(cursor["incarnation"]) if cursor else 0) + 1
            if cursor is not None:
                self.source.restore(cursor["source"])
                self.desk.again = deque((int(p), int(i)) for p, i in cursor["untrained"])
                self.counters.update({str(name): int(count) for name, count in cursor["counters"].items()})
                self.counters["resume_without_journal"] += len(self.desk.again)
        except (KeyError, TypeError, ValueError) as error:
            self.incarnation = 0
            return f"the checkpoint's cursor cannot be used: {error!r}"
        self.buffer.version = self.desk.published = hello.version
        self.bus_address = hello.bus_address
        log.info("replay: incarnation %d starts at version %d", self.incarnation, hello.version)
        for peer in self.peers.role("rollout_server"):
            self._send(peer.identity, self._welcome())
        return None

    def _goodbye(self, peer: Peer, message: m.Goodbye, now: float) -> None:
        self._send(peer.identity, m.Goodbye(reason="goodbye"))
        if peer.role == "learner" and (peer.hello.rank == 0 or message.failed):
            self.end(message.reason, failed=message.failed)
        elif peer.role == "rollout_server":
            self.lost(peer.identity, "closed", now)

    def _watch_the_learner(self, now: float) -> None:
        for peer in self.peers.role("learner"):
            gone = peer.unreachable_since is not None and now - peer.unreachable_since
            if gone and gone > self.config.network.silent_after_s:
                self.end(f"lost {peer.describe(now)}: its connection is gone [closed]", failed=True)
            elif now - peer.last_heard > self.config.learner.batch_deadline_s:
                self.end(f"lost {peer.describe(now)} [silent]", failed=True)

    def _watch_for_servers(self, now: float) -> None:
        if self.peers.role("rollout_server") or self.incarnation == 0 or self.ended is not None:
            self.no_server_since = now
        elif now - self.no_server_since > self.config.rollout.wait_for_servers_s:
            waited = self.config.rollout.wait_for_servers_s
            self.end(f"no rollout server for {waited:g} s (rollout.wait_for_servers_s) [silent]", failed=True)

    def advance(self, now: float) -> None:
        """Hand out what can be handed out: leases, evaluations, the batch that the ranks ask for."""
        if self.ended is not None or self.incarnation == 0:
            return
        self._assign_evaluations()
        self.desk.grant(now)
        self.batch_desk.form(self._stats)

    def _stats(self) -> dict[str, float]:
        servers = self.peers.role("rollout_server")
        idle = [p.gauges["idle_ratio"] for p in servers if "idle_ratio" in p.gauges]
        stats = {
            "buffer/size": float(self.buffer.count(SlotState.BUFFERED)),
            "buffer/leased": float(self.buffer.count(SlotState.LEASED)),
            "buffer/taken": float(self.buffer.count(SlotState.TAKEN)),
            "buffer/dropped": float(sum(n for key, n in self.counters.items() if key.startswith("dropped/"))),
            "buffer/superseded": float(self.counters["superseded"]),
            "rollout/servers": float(len(servers)),
            "rollout/tokens_per_s": sum(p.gauges.get("tokens_per_s", 0.0) for p in servers),
            "reward/error_rate": sum(self.desk.reward_errors) / max(1, len(self.desk.reward_errors)),
        }
        if idle:
            stats["rollout/idle_ratio"] = sum(idle) / len(idle)
        return stats | {f"rollout/groups/{p.name}": float(p.groups_accepted) for p in servers}

    # ---- evaluation -----------------------------------------------------------------------------------

    def _assign_evaluations(self) -> None:
        for server, evaluation in self.evaluations.assign():
            for greedy in evaluation.open_modes:
                self._send(
                    server,
                    m.EvaluationLease(
                        version=evaluation.version,
                        greedy=greedy,
                        seed=stream_seed(self.config.run.seed, evaluation.version, 1 << 20),
                        prompts=self.evaluation_rows,
                    ),
                )

    def _evaluation_result(self, peer: Peer, result: m.EvaluationResult) -> None:
        problem = problem_with_evaluation(result, len(self.evaluation_rows))
        if problem is not None:
            log.warning("replay: evaluation of version %d by %r rejected: %s", result.version, peer.name, problem)
            self._evaluation_failed_at(peer, result.version)
            return
        if self.evaluations.result(peer.identity, result.version, result.greedy):
            self.batch_desk.to_rank(0, result)
            if result.version in self.evaluations.closed:
                self._evaluation_closed(result.version, "")

    def _evaluation_closed(self, version: int, reason: str) -> None:
        for peer in self.peers.role("rollout_server"):
            self._send(peer.identity, m.EvaluationClosed(version=version, reason=reason))
        self.batch_desk.to_rank(0, m.EvaluationClosed(version=version, reason=reason))

    def _send(self, identity: str, message: Message) -> None:
        self.outbox.append((identity, message))
