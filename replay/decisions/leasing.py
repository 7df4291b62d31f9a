"""Grants leases to rollout servers, renews them, and takes them back. No socket, and time is an argument."""

import logging
from collections import Counter, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from replay import messages as m
from replay.data import BROKEN, stream_seed
from replay.endings import NothingToTrain
from replay.scores import TEACHER_ERROR
from replay.state.answers import PROMPT_ERRORS
from replay.state.apply import record
from replay.state.buffer import drops
from replay.state.leases import GroupId, Leases, Shares, Slot, SlotState
from replay.state.peers import Peer, Peers
from replay.state.run import RunState
from replay.state.validation import Bounds
from slipstream.families.experts import Experts
from slipstream.runtime.lifeline import BoundedLog

log = logging.getLogger(__name__)

RELEASES = {
    *PROMPT_ERRORS, "expired", "server_lost", "rejected", "reward_error", "environment_error", "engine_error",
    "aborted", "diverged", TEACHER_ERROR,
}  # fmt: skip
"""Reasons that are counted by name; they come from peers, so anything else is `other`."""


class LeaseScheduler:
    """Moves slots between queued and leased, and drops what cannot be done."""

    def __init__(self, run: RunState, peers: Peers, *, fail: Callable[[str], None]) -> None:
        self.run, self.peers = run, peers
        size = peers.expected.get("vocab_size", "")
        self.vocab_size = int(size) if size.isdigit() else None
        told = peers.expected.get("experts", "") if run.config.replays_routing else ""
        self.experts = Experts.of_told(told)
        """Of the model, where their routing is replayed."""
        self.buffer, self.leases = run.buffer, run.leases
        self.last_drop = ""
        """Group, reason and detail of the last drop."""
        self.bounded = BoundedLog(log)
        self._shares = Shares()
        self._fail = fail

    def expire(self, now: float) -> list[str]:
        """Take back leases that were not renewed in time; the names of their holders. Resend what servers lack."""
        self._resend()
        holders: list[str] = []
        for slot in list(Leases.expired(self.buffer.slots.values(), now)):
            peer = self.peers.get(slot.server or "")
            who = peer.describe(now) if peer else slot.server
            self.bounded.warning(
                "expired", "replay: lease of group %s (attempt %d) expired: not renewed for %.0f s by %s [slow]",
                slot.group_id, slot.attempt, self.leases.lease_s, who,
            )  # fmt: skip
            if peer is not None:
                self.cancel(slot, peer.identity, "lease expired")
                holders.append(peer.name)
            self.release(slot, "expired", f"not renewed by {who}")
        return sorted(set(holders))

    def _resend(self) -> None:
        """Send the leases again that their servers do not hold (replay/channel/delivery.py)."""
        for slot in self.buffer.slots.values():
            peer = self.peers.get(slot.server or "") if slot.state is SlotState.LEASED else None
            if peer is not None and peer.inventory.lacks((*slot.group_id, slot.attempt)):
                self.run.counters["leases_resent"] += 1
                self.peers.send(peer.identity, self._lease(slot))

    def server_lost(self, identity: str) -> int:
        """A server is lost: its evaluations and leases are free for others; how many leases there were."""
        self.run.board.server_lost(identity)
        held = self.held_by(identity)
        for slot in held:
            self.release(slot, "server_lost", identity)
        return len(held)

    def held_by(self, identity: str) -> list[Slot]:
        return [s for s in self.buffer.slots.values() if s.state is SlotState.LEASED and s.server == identity]

    def grant(self, now: float) -> None:
        """Hand out what servers have room for: the oldest admitted first, to the least loaded server."""
        queued = deque(s for s in self.buffer.slots.values() if s.state is SlotState.QUEUED)
        if not queued and self.buffer.room <= 0:
            return  # mostly: this runs after every few messages, with a thousand servers too
        held = Counter(s.server for s in self.buffer.slots.values() if s.state is SlotState.LEASED)
        servers = [peer for peer in self.peers.role("rollout_server") if peer.capacity and self.is_on_line(peer)]
        needed = queued[0].min_version if queued else self.buffer.next_min_version()
        work = held.total() + len(queued) + max(0, self.buffer.room)
        most = self._shares.most([peer.version for peer in servers], needed=needed, work=work, now=now)
        free = [
            (held[peer.identity] / peer.capacity, order, peer)
            for order, peer in enumerate(servers)
            if held[peer.identity] < min(most, peer.capacity)
        ]
        heapify(free)
        while free and (queued or self.buffer.room > 0):
            _, order, peer = heappop(free)
            chosen = self._next(queued, peer.version)
            if chosen is None:
                continue
            group_id, attempt, min_version = chosen
            known = self.buffer.slots.get(group_id)
            lag = self.buffer.async_lag if known is None else known.async_lag
            fields = {"group": list(group_id), "attempt": attempt, "min_version": min_version, "server": peer.identity}
            record(self.run, "lease", fields | {"async_lag": lag}, now=now)
            slot = self.buffer.slots[group_id]
            if BROKEN in slot.row:
                self.drop(slot, "broken_row", slot.row[BROKEN])
                if self.buffer.fruitless >= len(self.run.source):
                    return  # the run has ended: there is no other row
                heappush(free, (held[peer.identity] / peer.capacity, order, peer))
                continue
            held[peer.identity] += 1
            self.peers.send(peer.identity, self._lease(slot))
            if held[peer.identity] < min(most, peer.capacity):
                heappush(free, (held[peer.identity] / peer.capacity, order, peer))

    def is_on_line(self, peer: Peer) -> bool:
        """Whether the policy that this server holds is one that the learner has made on the surviving line."""
        return not self.run.policies.is_lost(peer.policy)

    def off_line(self, peer: Peer) -> None:
        """A server holds a policy that is not on the line: what it has begun does not count."""
        for slot in self.held_by(peer.identity):
            self.recall(slot)

    def recall(self, slot: Slot) -> None:
        """Take back a lease of a lost policy, and every answer of its attempts."""
        if slot.server is not None and self.peers.get(slot.server) is not None:
            self.cancel(slot, slot.server, "its policy is not on the learner's line any more")
        record(self.run, "release", self._fields(slot, reason="diverged"))

    def renew(self, peer: Peer, message: m.Renew, now: float) -> None:
        """Push the deadlines of leases that are still worked on, and keep what their answers have got."""
        leases = [tuple[int | str | bool, ...](lease[:3]) for lease in (*message.leases, *message.finished)]
        peer.inventory.heard([*leases, *(tuple(part[:4]) for part in message.evaluations)])
        if message.sampled != peer.sampled:
            peer.sampled, peer.moved_at = message.sampled, now
        renewed: dict[int, Slot] = {}
        queued = self._queued_behind(peer, message)
        for position, lease in enumerate(message.leases):
            if len(lease) != 4:
                continue
            pass_, index, attempt, tokens = lease
            slot, behind = self.buffer.slots.get((pass_, index)), peer.moved_at if position in queued else None
            if slot is not None and self.leases.renew(slot, peer.identity, attempt, tokens, now, queued_behind=behind):
                renewed[position] = slot
                continue
            self.run.counters["renewals_refused"] += 1
            cancel = m.Cancel(pass_=pass_, index=index, attempt=attempt, reason="this lease is no longer held")
            self.peers.send(peer.identity, cancel)
        for problem in self.run.partials.take(message, renewed, Bounds(self.run.newest_possible, self.vocab_size)):
            log.warning("replay: progress of %r is not kept: %s [corrupt]", peer.name, problem)

    def _queued_behind(self, peer: Peer, message: m.Renew) -> set[int]:
        """Positions of queued leases whose turn cannot have come: an evaluation or an earlier lease is worked on.

        A server begins its leases in their order, so one that later ones overtake is not waiting, it is forgotten.
        Behind an evaluation they wait where no other server asks for leases; else they go there in time.
        """
        queued, servers = set(message.queued), self.peers.role("rollout_server")
        alone = not any(other.capacity for other in servers if other is not peer)
        if alone and any(evaluation.server == peer.identity for evaluation in self.run.board.open.values()):
            return queued
        first = next((position for position in range(len(message.leases)) if position not in queued), None)
        return {position for position in queued if first is not None and position > first}

    def lower_lag(self, message: m.LowerLag) -> None:
        """A guard of the learner lowers the bound of the lag; one that is as low already stays as it is."""
        before = self.buffer.async_lag
        if not 0 <= message.async_lag < before:
            return
        fields = {"step": message.step, "async_lag": message.async_lag, "configured": self.buffer.configured_lag}
        record(self.run, "lag", fields)
        log.warning(
            "replay: the lag is %d at most, it was %d: a guard of the learner asks for it in step %d",
            message.async_lag, before, message.step,
        )  # fmt: skip

    def release(self, slot: Slot, reason: str, detail: str, **counted: object) -> None:
        """A lease ended without a group: back to the queue, or dropped once that is of no use.

        `counted` goes into the journal: `answers`, what came of those of a group that is not taken.
        """
        reason = reason if reason in RELEASES else "other"
        record(self.run, "release", self._fields(slot, reason=reason) | counted)
        dropped = self.leases.exhausted(slot)
        if reason in PROMPT_ERRORS or reason == TEACHER_ERROR:
            self.drop(slot, reason, detail)
        elif dropped is not None:
            told = "%d attempts failed and %d were interrupted, the last: %s"
            text = "replay: group %s is poison: " if dropped == "poison" else "replay: group %s is interrupted: "
            self.bounded.warning(dropped, text + told, slot.group_id, slot.failures, slot.interruptions, reason)
            self.drop(slot, dropped, f"{reason}: {detail}")

    def drop(self, slot: Slot, reason: str, detail: str = "") -> None:
        """This group is never trained; counted under its reason. A whole pass of these ends the run."""
        self.last_drop = f"group {slot.group_id[0]}/{slot.group_id[1]}: {reason}" + (f": {detail}" if detail else "")
        if reason == "broken_row":
            self.bounded.warning(reason, "replay: group %s is left out: %s [corrupt]", slot.group_id, detail)
        record(self.run, "drop", {"group": list(slot.group_id), "reason": reason})
        if self.buffer.fruitless >= len(self.run.source):
            counts = ", ".join(f"{count} {name}" for name, count in drops(self.run.counters).items())
            whole = f"data.train: {self.buffer.fruitless} prompts in a row, a whole pass over the data, were dropped"
            self._fail(str(NothingToTrain(f"{whole} ({counts}); the last, {self.last_drop}")))

    def treat_stale(self, slots: list[Slot]) -> None:
        """Apply on_stale to groups with tokens above the lag bound. Under `wait` they show that a guard failed."""
        for slot in slots:
            if slot.stale_retries:
                self.drop(slot, "too_slow")
                continue
            fields = {"group": list(slot.group_id), "min_version": self.buffer.last_min_version()}
            record(self.run, "stale", fields)

    def substitute(self, now: float) -> None:
        """Drop the groups that hold the next batch up past their deadline: the next finished ones take their places."""
        for slot in self.buffer.stragglers(now - self.run.config.replay.substitute_after_s):
            waited, tokens = now - (slot.begun_at or now), slot.tokens
            if slot.server is not None:
                self.cancel(slot, slot.server, "another group has taken its place")
            self.bounded.warning(
                "substituted", "replay: group %s has %d tokens after %.0f s and gives its place to the next one [slow]",
                slot.group_id, tokens, waited,
            )  # fmt: skip
            self.drop(slot, "substituted", f"{tokens} tokens after {waited:.0f} s")

    def cancel(self, slot: Slot, identity: str, reason: str) -> None:
        pass_, index = slot.group_id
        self.peers.send(identity, m.Cancel(pass_=pass_, index=index, attempt=slot.attempt, reason=reason))

    def _next(self, queued: deque[Slot], version: int) -> tuple[GroupId, int, int] | None:
        """(group, attempt, min_version) of the oldest lease that may start at `version`; a new one where room is."""
        if queued:  # its min_version is the lowest: they only grow in the order of admission
            slot, needed = queued[0], queued[0].min_version
            if needed > self.buffer.version:  # the line has gone back since: no group may wait for itself
                needed = min(needed, self.buffer.needed(slot))
            if needed > version:
                return None
            queued.popleft()
            return slot.group_id, slot.attempt + 1, needed
        if self.buffer.room > 0 and self.buffer.next_min_version() <= version:
            return self.run.upcoming(), 1, self.buffer.next_min_version()
        return None

    def _lease(self, slot: Slot) -> m.Lease:
        pass_, index = slot.group_id
        return m.Lease(
            pass_=pass_,
            index=index,
            attempt=slot.attempt,
            min_version=slot.min_version,
            lease_s=self.leases.lease_s,
            seed=stream_seed(self.run.config.run.seed, pass_, index),
            prompt=slot.row,
            **self.run.partials.prefix(slot.group_id, slot.min_version),
        )

    @staticmethod
    def _fields(slot: Slot, *, reason: str) -> dict[str, object]:
        return {"group": list(slot.group_id), "attempt": slot.attempt, "reason": reason}
