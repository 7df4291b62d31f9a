"""The lease desk: hands prompts to rollout servers and takes their groups in.

Everything that moves a slot between queued, leased and buffered, with the messages that this causes. No
socket, and time is an argument.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Literal

from configs.schema import Config
from replay import messages as m
from replay.buffer import GroupBuffer
from replay.channel import Message
from replay.leases import GroupId, Leases, Slot, SlotState
from replay.peers import Peer, Peers
from replay.prompts import PromptSource
from replay.validation import Bounds, problem_with

log = logging.getLogger(__name__)

REWARD_WINDOW = 32
"""Groups over which the share of reward errors is taken."""
NEVER_AGAIN = {"prompt_too_long", "prompt_not_rendered"}
"""Reasons for which a prompt is not leased a second time."""
RELEASES = NEVER_AGAIN | {"expired", "server_lost", "rejected", "reward_error", "engine_error", "aborted"}
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
        vocab_size: int | None,
        send: Send,
        fail: Callable[[str], None],
    ) -> None:
        self.vocab_size = vocab_size
        self.config = config
        self.buffer = buffer
        self.source = source
        self.peers = peers
        self.leases = Leases(config.replay.lease_s, config.replay.max_attempts)
        self.counters = buffer.counters
        self.published = 0
        """Newest version that an engine can have."""
        self.again: deque[GroupId] = deque()
        """Prompts whose groups a restart has lost; leased before the source goes on."""
        self.reward_errors: deque[bool] = deque(maxlen=REWARD_WINDOW)
        self._send = send
        self._fail = fail

    @property
    def newest_possible(self) -> int:
        """No token can be of a newer version: the learner makes version s only from a batch s formed here.

        Published alone would not do: it comes on another socket than the groups, which may overtake it.
        """
        formed = self.buffer.formed
        return max(self.published, formed.step if formed is not None else self.buffer.version)

    def newest(self, version: int) -> None:
        """The learner has handed `version` to the bus: tokens of it are possible from now on."""
        self.published = max(self.published, version)

    def expire(self, now: float) -> None:
        """Take back leases that were not renewed in time."""
        for slot in list(Leases.expired(self.buffer.slots.values(), now)):
            peer = self.peers.get(slot.server or "")
            who = peer.describe(now) if peer else slot.server
            log.warning(
                "replay: lease of group %s (attempt %d) expired: not renewed for %.0f s by %s [slow]",
                slot.group_id, slot.attempt, self.leases.lease_s, who,
            )  # fmt: skip
            if peer is not None:
                self._cancel(slot, peer.identity, "lease expired")
            self._release(slot, "expired")

    def server_lost(self, identity: str) -> int:
        """Give the leases of a server that is gone to others; how many there were."""
        held = list(Leases.held_by(self.buffer.slots.values(), identity))
        for slot in held:
            self._release(slot, "server_lost")
        return len(held)

    def grant(self, now: float) -> None:
        """Hand out what servers have room for: the oldest admitted first, to the least loaded server."""
        servers = [peer for peer in self.peers.role("rollout_server") if peer.capacity > 0]
        held = Counter(s.server for s in self.buffer.slots.values() if s.state is SlotState.LEASED)
        queued = deque(s for s in self.buffer.slots.values() if s.state is SlotState.QUEUED)
        while servers and (queued or self.buffer.room > 0):
            peer = min(servers, key=lambda p: held[p.identity] / p.capacity)
            slot = self._next_slot(queued, peer.version) if held[peer.identity] < peer.capacity else None
            if slot is None:
                servers.remove(peer)
                continue
            self.leases.grant(slot, peer.identity, now)
            held[peer.identity] += 1
            self._send(peer.identity, self._lease(slot))

    def _next_slot(self, queued: deque[Slot], version: int) -> Slot | None:
        """The oldest group that may start at `version`; admits the next prompt when there is room."""
        if queued:  # its min_version is the lowest: they only grow in the order of admission
            return queued.popleft() if queued[0].min_version <= version else None
        if self.buffer.room > 0 and self.buffer.next_min_version() <= version:
            return self.buffer.admit(*self._next_prompt())
        return None

    def _next_prompt(self) -> tuple[GroupId, dict[str, Any]]:
        if self.again:
            group_id = self.again.popleft()
            return group_id, self.source.row(group_id[1])
        pass_, index, row = self.source.next()
        return (pass_, index), row

    def _lease(self, slot: Slot) -> m.Lease:
        pass_, index = slot.group_id
        return m.Lease(
            pass_=pass_,
            index=index,
            attempt=slot.attempt,
            min_version=slot.min_version,
            lease_s=self.leases.lease_s,
            seed=stream_seed(self.config.run.seed, pass_, index),
            prompt=slot.row,
        )

    def renew(self, peer: Peer, message: m.Renew, now: float) -> None:
        """Push the deadlines of leases that are still worked on."""
        for pass_, index, attempt, tokens in (lease for lease in message.leases if len(lease) == 4):
            slot = self.buffer.slots.get((pass_, index))
            if slot is None or not self.leases.renew(slot, peer.identity, attempt, tokens, now):
                self.counters["renewals_refused"] += 1
                cancel = m.Cancel(pass_=pass_, index=index, attempt=attempt, reason="this lease is no longer held")
                self._send(peer.identity, cancel)

    def _release(self, slot: Slot, reason: str) -> None:
        reason = reason if reason in RELEASES else "other"
        self.counters[f"leases_released/{reason}"] += 1
        if reason in NEVER_AGAIN:
            self.buffer.drop(slot, reason)
        elif not self.leases.release(slot):
            log.error(
                "replay: group %s is poison: %d attempts failed, the last: %s", slot.group_id, slot.attempt, reason
            )
            self.buffer.drop(slot, "poison")

    def _cancel(self, slot: Slot, identity: str, reason: str) -> None:
        pass_, index = slot.group_id
        self._send(identity, m.Cancel(pass_=pass_, index=index, attempt=slot.attempt, reason=reason))

    def group(self, peer: Peer, group: m.Group) -> None:
        """Take a finished group in; the first valid result of a prompt wins (invariant 2)."""
        slot = self.buffer.slots.get((group.pass_, group.index))
        if slot is None:
            self._ack(peer, group, "superseded", "this group is finished")
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
            log.warning("replay: group %s of %r rejected: %s [corrupt]", slot.group_id, peer.name, problem)
            self._ack(peer, group, "rejected", problem)
            if slot.state is SlotState.LEASED and (slot.server, slot.attempt) == (peer.identity, group.attempt):
                self._release(slot, "rejected")
            return
        if slot.state is SlotState.LEASED and slot.server not in (None, peer.identity):
            self._cancel(slot, str(slot.server), "another server was first")
        slot.group, slot.state, slot.server = group, SlotState.BUFFERED, None
        peer.groups_accepted += 1
        self.counters["groups_accepted"] += 1
        self.reward_errors.append(False)
        self._ack(peer, group, "accepted")

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
        log.warning(
            "replay: %r gave up group %s (attempt %d): %s: %s",
            peer.name, slot.group_id, slot.attempt, cancel.reason, cancel.detail,
        )  # fmt: skip
        self._release(slot, cancel.reason)
        if cancel.reason == "reward_error":
            self.reward_errors.append(True)
            rate = sum(self.reward_errors) / REWARD_WINDOW
            if rate > self.config.reward.max_error_rate:
                self._fail(
                    f"reward function {self.config.reward.function!r} failed for {rate:.0%} of the last {REWARD_WINDOW}"
                    f" groups (reward.max_error_rate {self.config.reward.max_error_rate:g}); the last: {cancel.detail}"
                )


def stream_seed(seed: int, a: int, b: int) -> int:
    """A random stream of its own for each prompt of each pass, below 2^31."""
    mixed = (seed * 0x9E3779B97F4A7C15 + a * 0xBF58476D1CE4E5B9 + b * 0x94D049BB133111EB + 1) & ((1 << 64) - 1)
    mixed ^= mixed >> 31
    return (mixed * 0xD6E8FEB86659FD93 & ((1 << 64) - 1)) >> 33
