"""Forms the batch of a step once, and answers every rank's Take with its part.

Ranks start no collective before all hold their part (invariant 9): each says so with Take(have=True), and
Proceed goes out when the last one did. Ranks that compute the same rows together (learner.mesh) follow each other and
hold the same part. No socket.
"""

from collections.abc import Callable
from dataclasses import replace

from replay import messages as m
from replay import scores
from replay.batches import build as batches
from replay.batches import sharing
from replay.batches.overlong import shape
from replay.decisions.leasing import LeaseScheduler
from replay.decisions.making import RowsBeside, as_of
from replay.endings import StrayCommit
from replay.state.apply import record
from replay.state.peers import Peer, Peers
from replay.state.run import RunState


class BatchScheduler:
    def __init__(self, run: RunState, peers: Peers, leasing: LeaseScheduler, *, fail: Callable[[str], None]) -> None:
        self.run, self.peers, self.leasing, self.buffer = run, peers, leasing, run.buffer
        self.takes: dict[int, set[int]] = {}  # by step: ranks that asked for its batch
        self.haves: dict[int, set[int]] = {}  # and those that hold their part of it
        self.num_ranks, self.ranks_per_part = run.config.num_learner_ranks, run.config.learner.mesh.tensor
        self.batches: dict[int, list[m.Batch]] = {}
        self.sent: dict[int, int] = {}
        """Of each rank, the step whose part it was sent since its Hello."""
        self.take_since = 0.0
        self._beside = None if run.source.beside is None else RowsBeside(run, run.source.beside)
        """Rows of learner.sft."""
        self._fail = fail

    def take(self, peer: Peer, take: m.Take, now: float) -> None:
        """Idempotent: asking again for a batch that was formed gives the same answer."""
        if peer.role != "learner" or take.rank != peer.hello.rank or not 0 <= take.rank < self.num_ranks:
            reason = f"Take as rank {take.rank}: {peer.name!r} is not that rank"
            self.peers.send(peer.identity, m.Refused(code="message", reason=reason))
            return
        peer.incarnation = self.run.policies.incarnation
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
            self._send(take.step, take.rank)

    def joined(self, hello: m.Hello) -> None:
        """A peer says Hello: what a rank was sent may be lost."""
        if hello.role == "learner":
            self.sent.pop(hello.rank, None)

    def _send(self, step: int, rank: int) -> None:
        """Its part to a rank, once; then only that it was sent, which comes after the part or shows that it is lost."""
        if self.peers.rank(rank) is None:
            return
        was_sent, self.sent[rank] = self.sent.get(rank) == step, step
        self.peers.to_rank(rank, m.Sent(step=step) if was_sent else self.part(step, rank))

    def part(self, step: int, rank: int) -> m.Batch:
        """What a learner rank holds of the batch that was formed for a step."""
        return self.batches[step][rank // self.ranks_per_part]

    def _has(self, peer: Peer, take: m.Take) -> None:
        haves = self.haves.setdefault(take.step, set())
        haves.add(take.rank)
        # Its fellows wait for it in a collective, also if replay was restarted since.
        if self.run.proceeding == take.step:
            self.peers.send(peer.identity, m.Proceed(step=take.step))
        elif len(haves) == self.num_ranks:
            record(self.run, "proceed", {"step": take.step, "incarnation": self.run.policies.incarnation})
            for rank in range(self.num_ranks):
                self.peers.to_rank(rank, m.Proceed(step=take.step))

    def form(self, stats: Callable[[], dict[str, float]], now: float) -> None:
        """Form the batch once all ranks have asked for it; a step of the line gets the groups that it had."""
        buffer, step = self.buffer, self.buffer.version + 1
        if step in self.batches or len(self.takes.get(step, ())) < self.num_ranks:
            return
        made = buffer.line.steps.get(step)
        if made is not None:
            ids = [taken.group_id for taken in made.groups]
            groups, lag = [self.run.load_group(taken.location) for taken in made.groups], made.async_lag
            is_masked = made.is_masked
        else:
            if buffer.on_stale == "substitute":
                self.leasing.substitute(now)
            while stale := buffer.stale():
                self.leasing.treat_stale(stale)  # each is dropped, or its turn comes later, so this ends
            slots = buffer.oldest()
            if len(slots) < buffer.groups_per_step:
                return
            ids = [slot.group_id for slot in slots]
            groups, lag = [slot.group for slot in slots if slot.group is not None], buffer.bound(slots)
            is_masked = buffer.masks
        fields = {"step": step, "incarnation": self.run.policies.incarnation, "groups": ids}
        record(self.run, "take", fields | {"async_lag": lag, "masked": is_masked})
        if self.run.config.learner.facts.from_data:
            groups = [as_of(group, step) for group in groups]
        if is_masked:
            groups = [buffer.masked(group, lag, count=made is None) for group in groups]
        self.build(step, groups, stats())

    def build(self, step: int, groups: list[m.Group], stats: dict[str, float]) -> None:
        """Make every rank's part, and send it to the ranks."""
        config, made = self.run.config, self.buffer.line.steps[step]
        groups = [self.run.journal.whole(group) for group in groups]
        groups, measured = shape(groups, config.algorithm, config.rollout.max_new_tokens)
        if config.scoring is not None:
            measured |= scores.stats(step, groups, config.scoring.teachers)
        left_out = any(peer.hello.leaves_out_flat_groups for peer in self.peers.role("learner"))
        trained = batches.trained(groups, flat=not left_out)
        limit, parts = config.learner.max_tokens_per_microbatch, self.num_ranks // self.ranks_per_part
        wanted = config.learner.share_prefixes
        place = {"num_ranks": parts, "max_tokens": limit, "number": config.learner.minibatches}
        facts = config.learner.facts
        assignment, minibatches = sharing.assign_minibatches(groups, trained, wanted, whole=facts.compares, **place)
        taught = [] if self._beside is None else self._beside.groups(step)
        is_full = self.run.journal.size_bytes > config.replay.journal_max_bytes
        wants_checkpoint = (is_full and config.replay.journal_keep == "checkpoint") or self.run.checkpoint_asked
        self.batches[step] = [
            replace(
                part,
                publish=step >= self.buffer.line.last_committed,
                expected_digest=made.digest,
                async_lag=made.async_lag,
                checkpoint=wants_checkpoint,
                minibatches=minibatches if not taught else [],
            )
            for part in batches.build(
                step,
                groups,
                assignment,
                num_ranks=parts,
                stats=stats | measured,
                sampled=not facts.from_data,
                beside=batches.Beside(taught, limit),
            )
        ]
        for rank in range(self.num_ranks):
            self._send(step, rank)

    def committed(self, message: m.Committed) -> None:
        """The step is in the weights; a repeated commit changes nothing."""
        step, line = message.step, self.buffer.line
        if step <= self.buffer.version:
            return
        if step != self.buffer.version + 1 or step not in line.steps:
            what = f"commit of step {step}, but its batch was not taken (version {self.buffer.version})"
            self._fail(str(StrayCommit(what)))
            return
        again = bool(line.digest(step))
        fields = {"step": step, "incarnation": self.run.policies.incarnation, "digest": message.digest, "again": again}
        record(self.run, "commit", fields)
        self.forget(step)

    def forget(self, step: int) -> None:
        """Nobody asks for batches up to `step` any more."""
        for state in (self.takes, self.haves, self.batches):
            for old in [s for s in state if s <= step]:
                state.pop(old)

    def restart(self) -> None:
        """What ranks have asked for is void: a learner starts, or the line ends."""
        for state in (self.takes, self.haves, self.batches, self.sent):
            state.clear()
