"""The lease desk: hands prompts to rollout servers and takes their groups in.

Everything that moves a slot between queued, leased and buffered, with the messages that this causes. No
socket, and time is an argument.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Literal

import numpy as np

from configs.schema import Config
from replay import messages as m
from replay.bounded_log import BoundedLog
from replay.channel import Message
from replay.channel.frames import encode
from replay.desks.buffer import GroupBuffer, drops
from replay.desks.leases import GroupId, Leases, Shares, Slot, SlotState
from replay.desks.partials import Partials
from replay.desks.validation import Bounds, problem_with
from replay.journal import Journal
from replay.journal.format import Frames
from replay.peers import Peer, Peers
from replay.prompts import PromptSource, stream_seed

log = logging.getLogger(__name__)

REWARD_WINDOW = 32
"""Groups over which the share of reward errors is taken."""
NEVER_AGAIN = {"prompt_too_long", "prompt_not_rendered"}
"""Reasons for which a prompt is not leased a second time."""
RELEASES = NEVER_AGAIN | {
    "expired", "server_lost", "rejected", "reward_error", "engine_error", "aborted", "diverged",
}  # fmt: skip
"""Reasons that are counted by name; they come from peers, so anything else is `other`."""

Send = Callable[[str, Message], None]
AckStatus = Literal["accepted", "superseded", "rejected"]


class LeaseDesk:
    """Grants, renews, releases and completes leases."""

    def __init__(
        self,
        config: Config,
        buffer: GroupBuffer,
        source: PromptSource,
        peers: Peers,
        *,
        journal: Journal,
        vocab_size: int | None,
        send: Send,
        fail: Callable[[str], None],
    ) -> None:
        self.config, self.journal, self.vocab_size = config, journal, vocab_size
        self.buffer, self.source, self.peers = buffer, source, peers
        self.leases = Leases(config.replay.lease_s, config.replay.max_attempts)
        self.counters = buffer.counters
        self.partials: Partials | None = None
        """What running answers have got so far; None without replay.partial_rollouts."""
        if config.replay.partial_rollouts:
            self.partials = Partials(config.rollout.group_size, config.rollout.max_new_tokens)
            self.partials.counters = self.counters
        self.published = 0
        """Newest version that the present learner can have made."""
        self.incarnation = 0
        """Of the present learner."""
        self.again: deque[GroupId] = deque()
        """Prompts whose groups a restart has lost; leased before the source goes on."""
        self.gone: list[tuple[int, int, int]] = []
        """(first, last, version) each: what these incarnations made from this version on is not on the line."""
        self.flat_drops = 0
        """Groups that dynamic sampling has dropped since the last batch was taken."""
        self.reward_errors: deque[bool] = deque(maxlen=REWARD_WINDOW)
        self.last_drop = ""
        """Group, reason and detail of the last drop."""
        self._bounded = BoundedLog(log)
        self._shares = Shares()
        self._send = send
        self._fail = fail

    @property
    def newest_possible(self) -> int:
        """No token can be of a newer version: the learner makes version s only from a batch s that it got from here."""
        return max(self.published, self.buffer.version)

    def newest(self, version: int) -> None:
        """Tokens of `version` are possible from now on: its batch goes out, or the learner has published it.

        The latter alone would not do: it comes on another socket than the groups, which may overtake it.
        """
        self.published = max(self.published, version)

    def expire(self, now: float) -> None:
        """Take back leases that were not renewed in time."""
        for slot in list(Leases.expired(self.buffer.slots.values(), now)):
            peer = self.peers.get(slot.server or "")
            who = peer.describe(now) if peer else slot.server
            self._bounded.warning(
                "expired", "replay: lease of group %s (attempt %d) expired: not renewed for %.0f s by %s [slow]",
                slot.group_id, slot.attempt, self.leases.lease_s, who,
            )  # fmt: skip
            if peer is not None:
                self._cancel(slot, peer.identity, "lease expired")
            self._release(slot, "expired", f"not renewed by {who}")

    def server_lost(self, identity: str) -> int:
        """Give the leases of a server that is gone to others; how many there were."""
        held = list(Leases.held_by(self.buffer.slots.values(), identity))
        for slot in held:
            self._release(slot, "server_lost", identity)
        return len(held)

    def grant(self, now: float) -> None:
        """Hand out what servers have room for: the oldest admitted first, to the least loaded server."""
        queued = deque(s for s in self.buffer.slots.values() if s.state is SlotState.QUEUED)
        if not queued and self.buffer.room <= 0:
            return  # mostly: this runs after every few messages, with a thousand servers too
        held = Counter(s.server for s in self.buffer.slots.values() if s.state is SlotState.LEASED)
        servers = [peer for peer in self.peers.role("rollout_server") if peer.capacity and self.is_on_line(peer)]
        needed = queued[0].min_version if queued else self.buffer.next_min_version()
        work = held.total() + len(queued) + self.buffer.room
        most = self._shares.most([peer.version for peer in servers], needed=needed, work=work, now=now)
        free = [
            (held[peer.identity] / peer.capacity, order, peer)
            for order, peer in enumerate(servers)
            if held[peer.identity] < min(most, peer.capacity)
        ]
        heapify(free)
        while free and (queued or self.buffer.room > 0):
            _, order, peer = heappop(free)
            slot = self._next_slot(queued, peer.version)
            if slot is None:
                continue
            self.leases.grant(slot, peer.identity, now)
            held[peer.identity] += 1
            self._write("lease", slot, attempt=slot.attempt, min_version=slot.min_version, server=peer.identity)
            self._send(peer.identity, self._lease(slot))
            if held[peer.identity] < min(most, peer.capacity):
                heappush(free, (held[peer.identity] / peer.capacity, order, peer))

    def is_on_line(self, peer: Peer) -> bool:
        """Whether the policy that this server holds is one that the learner has made on the surviving line."""
        return not self._is_gone(peer.incarnation, peer.version)

    def _is_gone(self, incarnation: int, version: int) -> bool:
        return any(first <= incarnation <= last and version >= lost for first, last, lost in self.gone)

    def _is_unproven(self, incarnation: int, version: int) -> bool:
        """Whether nobody has told replay the digest of this policy: its publication may overtake its commit."""
        of_the_present = incarnation == self.incarnation or version > self.buffer.line.last_committed
        return version > self.buffer.version and of_the_present

    def lose(self, version: int, *, first: int = 0, last: int) -> None:
        """Policies from `version` on that incarnations `first` to `last` made are not on the line (any more)."""
        others = [old for old in self.gone if not (first <= old[0] and old[1] <= last and version <= old[2])]
        self.gone = [*others, (first, last, version)]
        if self.partials is not None:
            self.partials.forget_newer(version - 1)

    def off_line(self, peer: Peer) -> None:
        """A server holds a policy that is not on the line: what it has begun does not count."""
        for slot in list(Leases.held_by(self.buffer.slots.values(), peer.identity)):
            self._recall(slot)

    def restart(self, progress: int, incarnation: int) -> None:
        """A new incarnation starts; the last that replay knows of its predecessor is the commit of step `progress`.

        That may have made and published versions above all the same, if replay and learner died together: the new
        one makes them anew, perhaps with other weights.
        """
        self.incarnation = incarnation
        if incarnation == 1:
            return
        self.lose(progress + 1, first=incarnation - 1, last=incarnation - 1)
        for peer in self.peers.role("rollout_server"):
            if not self.is_on_line(peer):
                self.off_line(peer)

    def void(self, version: int, incarnation: int) -> list[GroupId]:
        """Policies from `version` on that earlier incarnations made are gone, and with them what they have sampled.

        Returns the groups that are sampled anew. What runs is cancelled: nobody can tell which policy goes on with it.
        """
        self.lose(version, last=incarnation - 1)
        lost = []
        for slot in list(self.buffer.slots.values()):
            if slot.state is SlotState.LEASED:
                self._recall(slot)
            elif slot.state is SlotState.QUEUED:
                slot.recall()  # attempts that have expired may still send their groups
            elif slot.group is not None and int(slot.group.versions.max()) >= version:
                slot.recall()
                lost.append(slot.group_id)
        self.counters["superseded"] += len(lost)
        return lost

    def _recall(self, slot: Slot) -> None:
        if slot.server is not None and self.peers.get(slot.server) is not None:
            self._cancel(slot, slot.server, "its policy is not on the learner's line any more")
        self.counters["leases_released/diverged"] += 1
        self._write("release", slot, attempt=slot.attempt, reason="diverged")
        slot.recall()

    def _next_slot(self, queued: deque[Slot], version: int) -> Slot | None:
        """The oldest group that may start at `version`; admits the next prompt when there is room."""
        if queued:  # its min_version is the lowest: they only grow in the order of admission
            slot, needed = queued[0], queued[0].min_version
            if needed > self.buffer.version:  # the line has gone back since, and nobody must wait for himself
                needed = min(needed, self.buffer.needed(slot))
            if needed > version:
                return None
            slot.min_version = needed
            return queued.popleft()
        if self.buffer.room > 0 and self.buffer.next_min_version() <= version:
            return self.buffer.admit(*self.next_prompt())
        return None

    def next_prompt(self) -> tuple[GroupId, dict[str, Any]]:
        """The prompt that is admitted next."""
        if self.again:
            group_id = self.again.popleft()
            return group_id, self.source.row(group_id[1])
        pass_, index, row = self.source.next()
        return (pass_, index), row

    def _lease(self, slot: Slot) -> m.Lease:
        pass_, index = slot.group_id
        prefix = self.partials.prefix(slot.group_id, slot.min_version) if self.partials is not None else {}
        return m.Lease(
            pass_=pass_,
            index=index,
            attempt=slot.attempt,
            min_version=slot.min_version,
            lease_s=self.leases.lease_s,
            seed=stream_seed(self.config.run.seed, pass_, index),
            prompt=slot.row,
            **prefix,
        )

    def renew(self, peer: Peer, message: m.Renew, now: float) -> None:
        """Push the deadlines of leases that are still worked on, and keep what their answers have got."""
        held: dict[int, Slot] = {}
        for position, lease in enumerate(message.leases):
            if len(lease) != 4:
                continue
            pass_, index, attempt, tokens = lease
            slot = self.buffer.slots.get((pass_, index))
            if slot is not None and self.leases.renew(slot, peer.identity, attempt, tokens, now):
                held[position] = slot
                continue
            self.counters["renewals_refused"] += 1
            cancel = m.Cancel(pass_=pass_, index=index, attempt=attempt, reason="this lease is no longer held")
            self._send(peer.identity, cancel)
        if self.partials is not None:
            for problem in self.partials.take(message, held, Bounds(self.newest_possible, self.vocab_size)):
                log.warning("replay: progress of %r is not kept: %s [corrupt]", peer.name, problem)

    def _release(self, slot: Slot, reason: str, detail: str) -> None:
        reason = reason if reason in RELEASES else "other"
        self.counters[f"leases_released/{reason}"] += 1
        self._write("release", slot, attempt=slot.attempt, reason=reason)
        if self.partials is not None:
            self.partials.released(slot.group_id, reason)
        dropped = self.leases.release(slot, reason)
        if reason in NEVER_AGAIN:
            self.drop(slot, reason, detail)
        elif dropped is not None:
            told = "%d attempts failed and %d were interrupted, the last: %s"
            text = "replay: group %s is poison: " if dropped == "poison" else "replay: group %s is interrupted: "
            self._bounded.warning(dropped, text + told, slot.group_id, slot.failures, slot.interruptions, reason)
            self.drop(slot, dropped, f"{reason}: {detail}")

    def drop(self, slot: Slot, reason: str, detail: str = "") -> None:
        """This group is never trained; counted under its reason. A whole pass of these ends the run."""
        self.last_drop = f"group {slot.group_id[0]}/{slot.group_id[1]}: {reason}" + (f": {detail}" if detail else "")
        self.buffer.drop(slot, reason)
        if self.buffer.fruitless >= len(self.source):
            counts = ", ".join(f"{count} {name}" for name, count in drops(self.counters).items())
            whole = f"data.train: {self.buffer.fruitless} prompts in a row, a whole pass over the data, were dropped"
            self._fail(f"{whole} ({counts}); the last, {self.last_drop}")
        self._write("drop", slot, reason=reason)
        if self.partials is not None:
            self.partials.forget(slot.group_id)

    def treat_stale(self, slots: list[Slot]) -> None:
        """Apply on_stale to groups with tokens above the lag bound. Under `wait` they show that a guard failed."""
        for slot in slots:
            if slot.stale_retries:
                self.drop(slot, "too_slow")
                continue
            self.buffer.lease_again(slot)
            self._write("stale", slot, min_version=slot.min_version)

    def _write(self, kind: str, slot: Slot, **fields: Any) -> None:
        self.journal.append(kind, {"group": list(slot.group_id), **fields})

    def _cancel(self, slot: Slot, identity: str, reason: str) -> None:
        pass_, index = slot.group_id
        self._send(identity, m.Cancel(pass_=pass_, index=index, attempt=slot.attempt, reason=reason))

    def group(self, peer: Peer, group: m.Group, frames: Frames = ()) -> None:
        """Take a finished group in; the first valid result of a prompt wins (invariant 2).

        Args:
            peer: who sent it.
            group: the message.
            frames: the message as it came, for the journal; encoded again where they are not at hand.
        """
        slot = self.buffer.slots.get((group.pass_, group.index))
        if slot is None:
            self._ack(peer, group, "superseded", "this group is finished")
            return
        if group.attempt <= slot.voided:
            self._ack(peer, group, "superseded", "this attempt was called back: too old, or not of the learner's line")
            return
        if slot.group is not None:
            repeated = slot.group.attempt == group.attempt
            self.counters["duplicate_groups" if repeated else "superseded"] += 1
            self._ack(peer, group, "accepted" if repeated else "superseded")
            return
        bounds = Bounds(self.newest_possible, self.vocab_size)
        problem = problem_with(group, slot, self.config, bounds)
        if problem is not None:
            self.counters["groups_rejected"] += 1
            self._bounded.warning(
                "rejected", "replay: group %s of %r rejected: %s [corrupt]", slot.group_id, peer.name, problem
            )
            self._ack(peer, group, "rejected", problem)
            if slot.state is SlotState.LEASED and (slot.server, slot.attempt) == (peer.identity, group.attempt):
                self._release(slot, "rejected", problem)
            return
        policies = [(incarnation, version) for incarnation, version in group.policies]
        if not policies:
            policies = [(peer.incarnation, int(group.versions.max()))]
        if any(self._is_gone(*policy) for policy in policies):
            self._ack(peer, group, "superseded", "its policy is not on the learner's line any more")
            if slot.server == peer.identity:
                self._recall(slot)
            return
        if any(self._is_unproven(*policy) for policy in policies):
            return  # it comes again until it is acked
        if slot.state is SlotState.LEASED and slot.server not in (None, peer.identity):
            self._cancel(slot, str(slot.server), "another server was first")
        self._accept(peer, slot, group, frames or encode(group, "", group.attempt))
        peer.groups_accepted += 1
        self.counters["groups_accepted"] += 1
        self.reward_errors.append(False)
        self._ack(peer, group, "accepted")

    def _accept(self, peer: Peer, slot: Slot, group: m.Group, frames: Frames) -> None:
        fields = {"group": list(slot.group_id), "attempt": group.attempt, "server": peer.identity}
        slot.location = self.journal.append("group", fields, frames)
        slot.group, slot.state, slot.server = group, SlotState.BUFFERED, None
        self.buffer.fruitless = 0
        if self.partials is not None:
            self.partials.forget(slot.group_id)
        if not self.config.algorithm.dynamic_sampling or np.ptp(group.rewards) > 0:
            return
        if self.flat_drops < self.config.algorithm.max_flat_drops * self.buffer.groups_per_step:
            self.flat_drops += 1
            self.drop(slot, "flat_rewards")
        else:
            self.counters["flat_groups_kept"] += 1

    def _ack(self, peer: Peer, group: m.Group, status: AckStatus, reason: str = "") -> None:
        if status == "superseded" and reason:
            self.counters["superseded"] += 1
        self._send(
            peer.identity,
            m.Ack(pass_=group.pass_, index=group.index, attempt=group.attempt, status=status, reason=reason),
        )

    def failed(self, peer: Peer, cancel: m.Cancel) -> None:
        """A server gives a lease up; too many reward errors end the run."""
        slot = self.buffer.slots.get((cancel.pass_, cancel.index))
        if slot is None or slot.state is not SlotState.LEASED or slot.server != peer.identity:
            return
        if slot.attempt != cancel.attempt:
            return
        self._bounded.warning(
            cancel.reason if cancel.reason in RELEASES else "other", "replay: %r gave up group %s (attempt %d): %s: %s",
            peer.name, slot.group_id, slot.attempt, cancel.reason, cancel.detail,
        )  # fmt: skip
        self._release(slot, cancel.reason, cancel.detail)
        if cancel.reason == "reward_error":
            self.reward_errors.append(True)
            failed, limit = sum(self.reward_errors), self.config.reward.max_error_rate
            if failed > limit * REWARD_WINDOW:
                self._fail(
                    f"reward function {self.config.reward.function!r} failed for {failed} of the last"
                    f" {len(self.reward_errors)} groups; reward.max_error_rate {limit:g} allows"
                    f" {int(limit * REWARD_WINDOW)} of {REWARD_WINDOW}; the last: {cancel.detail}"
                )
