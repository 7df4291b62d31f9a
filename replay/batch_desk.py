"""The batch desk: forms the batch of a step once and answers every rank's Take with its part.

Ranks start no collective before all hold their part (invariant 9): each says so with Take(have=True), and
Proceed goes out when the last one did. No socket.
"""

import logging
from collections.abc import Callable

from configs.schema import Config
from replay import batches
from replay import messages as m
from replay.buffer import GroupBuffer, OutOfStep
from replay.channel import Message
from replay.peers import Peer, Peers

log = logging.getLogger(__name__)


class BatchDesk:
    """Takes, batches and commits."""

    def __init__(
        self,
        config: Config,
        buffer: GroupBuffer,
        peers: Peers,
        *,
        send: Callable[[str, Message], None],
        fail: Callable[[str], None],
    ) -> None:
        self.config = config
        self.buffer = buffer
        self.peers = peers
        self.takes: dict[int, set[int]] = {}
        """Ranks that asked for the batch of a step."""
        self.haves: dict[int, set[int]] = {}
        """Ranks that hold their part of it."""
        self.batches: dict[int, list[m.Batch]] = {}
        self.take_since = 0.0
        self._send = send
        self._fail = fail

    def take(self, peer: Peer, take: m.Take, now: float) -> None:
        """Idempotent: asking again for a batch that was formed gives the same answer."""
        ranks = self.config.num_learner_ranks
        if peer.role != "learner" or take.rank != peer.hello.rank or not 0 <= take.rank < ranks:
            self._send(peer.identity, m.Refused(reason=f"Take as rank {take.rank}: {peer.name!r} is not that rank"))
            return
        # Another rank may ask before rank 0's commit of the step before has arrived: their sockets have no order.
        if not self.buffer.version < take.step <= self.buffer.version + 2:
            return
        if take.have and take.step not in self.batches:
            return
        if take.have:
            haves = self.haves.setdefault(take.step, set())
            haves.add(take.rank)
            if len(haves) == ranks:
                for rank in range(ranks):
                    self.to_rank(rank, m.Proceed(step=take.step))
            return
        if not self.takes.get(take.step):
            self.take_since = now
        if take.step in self.batches:
            self._send(peer.identity, self.batches[take.step][take.rank])
        self.takes.setdefault(take.step, set()).add(take.rank)

    def form(self, stats: Callable[[], dict[str, float]]) -> None:
        """Form the batch once all ranks have asked for it."""
        step = self.buffer.version + 1
        ranks = self.config.num_learner_ranks
        if step in self.batches or len(self.takes.get(step, ())) < ranks:
            return
        try:
            formed = self.buffer.form(step)
        except OutOfStep as error:
            self._fail(str(error))
            return
        if formed is None:
            return
        groups = [slot.group for slot in formed.slots if slot.group is not None]
        assignment = batches.assign(batches.total_lengths(groups), ranks, self.config.learner.max_tokens_per_microbatch)
        self.batches[step] = batches.build(step, groups, assignment, num_ranks=ranks, stats=stats())
        for rank in range(ranks):
            self.to_rank(rank, self.batches[step][rank])

    def committed(self, message: m.Committed) -> None:
        """The step is in the weights; a repeated commit changes nothing."""
        try:
            if not self.buffer.commit(message.step):
                return
        except OutOfStep as error:
            self._fail(str(error))
            return
        for state in (self.takes, self.haves, self.batches):
            for step in [s for s in state if s <= message.step]:
                state.pop(step)

    def to_rank(self, rank: int, message: Message) -> None:
        """Send to a learner rank, if it is connected."""
        peer = self.peers.rank(rank)
        if peer is not None:
            self._send(peer.identity, message)
