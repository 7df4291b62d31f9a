"""The batch desk: forms the batch of a step once and answers every rank's Take with its part.

Ranks start no collective before all hold their part (invariant 9): each says so with Take(have=True), and
Proceed goes out when the last one did. No socket.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

from configs.schema import Config
from replay import messages as m
from replay.channel import Message
from replay.desks import batches
from replay.desks.buffer import GroupBuffer, OutOfStep
from replay.desks.lease_desk import LeaseDesk
from replay.journal import Journal
from replay.peers import Peer, Peers

log = logging.getLogger(__name__)


class BatchDesk:
    """Takes, batches and commits."""

    def __init__(
        self,
        config: Config,
        desk: LeaseDesk,
        peers: Peers,
        *,
        journal: Journal,
        send: Callable[[str, Message], None],
        fail: Callable[[str], None],
    ) -> None:
        self.config = config
        self.desk = desk
        self.buffer: GroupBuffer = desk.buffer
        self.peers = peers
        self.journal = journal
        self.incarnation = 0
        self.takes: dict[int, set[int]] = {}
        """Ranks that asked for the batch of a step."""
        self.haves: dict[int, set[int]] = {}
        """Ranks that hold their part of it."""
        self.num_ranks = config.num_learner_ranks
        self.batches: dict[int, list[m.Batch]] = {}
        self.proceeding = 0
        """Step that some rank may have begun, because Proceed went out."""
        self.take_since = 0.0
        self._send = send
        self._fail = fail

    def take(self, peer: Peer, take: m.Take, now: float) -> None:
        """Idempotent: asking again for a batch that was formed gives the same answer."""
        if peer.role != "learner" or take.rank != peer.hello.rank or not 0 <= take.rank < self.num_ranks:
            self._send(peer.identity, m.Refused(reason=f"Take as rank {take.rank}: {peer.name!r} is not that rank"))
            return
        peer.incarnation = self.incarnation
        # Another rank may ask before rank 0's commit of the step before has arrived: their sockets have no order.
        if not self.buffer.version < take.step <= self.buffer.version + 2:
            return
        if take.have and take.step not in self.buffer.line.steps:
            return
        if not self.takes.get(take.step):
            self.take_since = now
        # One that holds its part has asked for it, if replay was restarted since: its fellows may still need theirs.
        self.takes.setdefault(take.step, set()).add(take.rank)
        if take.have:
            self._has(peer, take)
        elif take.step in self.batches:
            self._send(peer.identity, self.batches[take.step][take.rank])

    def _has(self, peer: Peer, take: m.Take) -> None:
        haves = self.haves.setdefault(take.step, set())
        haves.add(take.rank)
        if self.proceeding == take.step:  # its fellows wait for it in a collective, also if replay was restarted since
            self._send(peer.identity, m.Proceed(step=take.step))
        elif len(haves) == self.num_ranks:
            self.proceeding = take.step
            self.journal.append("proceed", {"step": take.step, "incarnation": self.incarnation})
            for rank in range(self.num_ranks):
                self.to_rank(rank, m.Proceed(step=take.step))

    def form(self, stats: Callable[[], dict[str, float]]) -> None:
        """Form the batch once all ranks have asked for it."""
        step = self.buffer.version + 1
        ranks = self.num_ranks
        if step in self.batches or len(self.takes.get(step, ())) < ranks:
            return
        try:
            while step not in self.buffer.line.steps and (stale := self.buffer.stale()):
                self.desk.treat_stale(stale)  # each is gone, or its turn comes later, so this ends
            formed = self.buffer.form(step)
        except OutOfStep as error:
            self._fail(str(error))
            return
        if formed is None:
            return
        self.desk.flat_drops = 0
        self.desk.newest(step)
        made = self.buffer.line.steps[step]
        ids = [list(taken.group_id) for taken in made.groups]
        self.journal.append("take", {"step": step, "incarnation": self.incarnation, "groups": ids})
        groups, known = formed.groups, self.buffer.line.last_committed
        assignment = batches.assign(batches.total_lengths(groups), ranks, self.config.learner.max_tokens_per_microbatch)
        self.batches[step] = [
            replace(
                batch,
                publish=step >= known,
                expected_digest=made.digest,
                checkpoint=self.journal.size_bytes > self.config.replay.journal_max_bytes
                and self.config.replay.journal_keep == "checkpoint",
            )
            for batch in batches.build(step, groups, assignment, num_ranks=ranks, stats=stats())
        ]
        for rank in range(ranks):
            self.to_rank(rank, self.batches[step][rank])

    def committed(self, message: m.Committed) -> str | None:
        """The step is in the weights; a repeated commit changes nothing.

        Returns the digest that the journal has for the step when the weights are not those: the line diverges here.
        """
        step = message.step
        expected = self.buffer.line.digest(step)
        try:
            if not self.buffer.commit(step, message.digest):
                return None
        except OutOfStep as error:
            self._fail(str(error))
            return None
        fields = {"step": step, "incarnation": self.incarnation, "digest": message.digest, "again": bool(expected)}
        self.journal.append("commit", fields)
        self.forget(step)
        return expected if expected and expected != message.digest else None

    def forget(self, step: int) -> None:
        """Nobody asks for batches up to `step` any more."""
        for state in (self.takes, self.haves, self.batches):
            for old in [s for s in state if s <= step]:
                state.pop(old)

    def restart(self, incarnation: int) -> None:
        """A new incarnation of the learner: what ranks of the last one asked for is void."""
        self.incarnation, self.proceeding = incarnation, 0
        for state in (self.takes, self.haves, self.batches):
            state.clear()

    def to_rank(self, rank: int, message: Message) -> None:
        """Send to a learner rank, if it is connected."""
        peer = self.peers.rank(rank)
        if peer is not None:
            self._send(peer.identity, message)
