"""Takes finished groups in, and leases that a server gives up. No socket."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from replay import messages as m
from replay.channel.frames import encode
from replay.desks.granting import RELEASES, Granting
from replay.desks.leases import GroupId, Slot, SlotState
from replay.desks.line import Policy
from replay.desks.validation import Bounds, problem_with
from replay.endings import EnvironmentsFail, RewardsFail
from replay.journal.apply import record
from replay.journal.format import Frames
from replay.peers import Peer, Peers
from replay.run import Run

log = logging.getLogger(__name__)

REWARD_WINDOW = 32
"""Groups over which the share of errors of rewards and environments is taken."""
AckStatus = Literal["accepted", "superseded", "rejected", "missing"]


class Intake:
    """Accepts the first valid group of each prompt (invariant 2)."""

    def __init__(self, run: Run, peers: Peers, granting: Granting, *, fail: Callable[[str], None]) -> None:
        self.run, self.peers, self.granting = run, peers, granting
        self.reward_errors: deque[bool] = deque(maxlen=REWARD_WINDOW)
        self.early: set[tuple[str, GroupId, int]] = set()
        """(sender, group, attempt) that came before the commit of its policy did; asked for again after the next."""
        self._fail = fail

    def group(self, peer: Peer, group: m.Group, frames: Frames = ()) -> None:
        """Take a finished group in; `frames` are the message as it came, for the journal."""
        slot = self.run.buffer.slots.get((group.pass_, group.index))
        if (settled := _settled(slot, group.attempt)) is not None:
            self.run.counters["duplicate_groups" if settled[0] == "accepted" else "superseded"] += 1
            self._ack(peer, group, *settled)
            return
        assert slot is not None
        if problem := self._problem_with(group, slot):
            self._reject(peer, slot, group, problem)
        else:
            self._judge(peer, slot, group, frames)

    def finished(self, peer: Peer, keys: Sequence[Sequence[int]]) -> None:
        """A server has sent these groups, and waits for a word: the one of before, or that a group was lost."""
        for pass_, index, attempt in (key for key in keys if len(key) == 3):
            slot = self.run.buffer.slots.get((pass_, index))
            this = m.OfLease(pass_=pass_, index=index, attempt=attempt)
            if (settled := _settled(slot, attempt)) is not None:
                self._ack(peer, this, *settled)
            elif (peer.identity, (pass_, index), attempt) not in self.early:
                self._ack(peer, this, "missing")

    def failed(self, peer: Peer, cancel: m.Cancel) -> None:
        """A server gives a lease up; too many reward errors end the run."""
        slot = self.run.buffer.slots.get((cancel.pass_, cancel.index))
        if slot is None or not self._holds(peer, slot, cancel.attempt):
            return
        self.granting.bounded.warning(
            cancel.reason if cancel.reason in RELEASES else "other", "replay: %r gave up group %s (attempt %d): %s: %s",
            peer.name, slot.group_id, slot.attempt, cancel.reason, cancel.detail,
        )  # fmt: skip
        self.granting.release(slot, cancel.reason, cancel.detail)
        if cancel.reason == "reward_error":
            self._failed(f"reward function {self.run.config.reward.shown!r}", cancel.detail)
        elif cancel.reason == "environment_error":
            self._failed(f"environment {self.run.config.environment.function!r}", cancel.detail)

    def _failed(self, what: str, detail: str) -> None:
        self.reward_errors.append(True)
        reward, failed = self.run.config.reward, sum(self.reward_errors)
        if failed > reward.max_error_rate * REWARD_WINDOW:
            ending = RewardsFail if what.startswith("reward") else EnvironmentsFail
            text = (
                f"{what} failed for {failed} of the last {len(self.reward_errors)}"
                f" groups; reward.max_error_rate {reward.max_error_rate:g} allows"
                f" {int(reward.max_error_rate * REWARD_WINDOW)} of {REWARD_WINDOW}; the last: {detail}"
            )
            self._fail(str(ending(text)))

    def _reject(self, peer: Peer, slot: Slot, group: m.Group, problem: str) -> None:
        self.run.counters["groups_rejected"] += 1
        self.granting.bounded.warning(
            "rejected", "replay: group %s of %r rejected: %s [corrupt]", slot.group_id, peer.name, problem
        )
        self._ack(peer, group, "rejected", problem)
        if self._holds(peer, slot, group.attempt):
            self.granting.release(slot, "rejected", problem)

    @staticmethod
    def _holds(peer: Peer, slot: Slot, attempt: int) -> bool:
        return slot.state is SlotState.LEASED and (slot.server, slot.attempt) == (peer.identity, attempt)

    def _judge(self, peer: Peer, slot: Slot, group: m.Group, frames: Frames) -> None:
        """Accept the group if its policies are on the line; one without a commit yet is passed over."""
        buffer, known = self.run.buffer, self.run.policies
        policies = [Policy(incarnation, version) for incarnation, version in group.policies]
        if not policies:
            policies = [Policy(peer.incarnation, int(group.versions.max()))]
        if any(known.is_lost(policy) for policy in policies):
            self.run.counters["superseded"] += 1
            self._ack(peer, group, "superseded", "its policy is not on the learner's line any more")
            if slot.server == peer.identity:
                self.granting.recall(slot)
            return
        committed = {"version": buffer.version, "last_committed": buffer.line.last_committed}
        if any(known.is_unproven(policy, **committed) for policy in policies):
            self.early.add((peer.identity, slot.group_id, group.attempt))
            return
        if slot.state is SlotState.LEASED and slot.server not in (None, peer.identity):
            self.granting.cancel(slot, str(slot.server), "another server was first")
        self._accept(peer, slot, group, frames or encode(group, "", group.attempt))

    def _accept(self, peer: Peer, slot: Slot, group: m.Group, frames: Frames) -> None:
        fields: dict[str, object] = {
            "group": list(slot.group_id), "attempt": group.attempt, "server": peer.identity,
        }  # fmt: skip
        if self.run.source.is_rated:  # what the order of prompts depends on is in the journal
            fields["solved"] = float(np.mean(group.rewards >= self.run.config.evaluation.solved_at))
        record(self.run, "group", fields, frames)
        slot.group = group
        peer.groups_accepted += 1
        self.reward_errors.append(False)
        self._ack(peer, group, "accepted")
        sampling = self.run.config.algorithm
        if not sampling.dynamic_sampling or np.ptp(group.rewards) > 0:
            return
        if self.run.flat_drops < sampling.max_flat_drops * self.run.buffer.groups_per_step:
            self.granting.drop(slot, "flat_rewards")
        else:
            self.run.counters["flat_groups_kept"] += 1

    def _problem_with(self, group: m.Group, slot: Slot) -> str | None:
        return problem_with(group, slot, self.run.config, Bounds(self.run.newest_possible, self.granting.vocab_size))

    def _ack(self, peer: Peer, of: m.OfLease, status: AckStatus, reason: str = "") -> None:
        ack = m.Ack(pass_=of.pass_, index=of.index, attempt=of.attempt, status=status, reason=reason)
        self.peers.send(peer.identity, ack)


def _settled(slot: Slot | None, attempt: int) -> tuple[AckStatus, str] | None:
    """What is said of an attempt whose group is not wanted (any more); None while it is."""
    if slot is None:
        return "superseded", "this group is finished"
    if attempt <= slot.voided:
        return "superseded", "this attempt was called back: too old, or not of the learner's line"
    if slot.group is not None:
        return ("accepted" if slot.group.attempt == attempt else "superseded"), ""
    return None
