"""Takes finished groups in, and leases that a server gives up. No socket."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from replay import filters
from replay import messages as m
from replay.channel.frames import encode
from replay.decisions.leasing import RELEASES, LeaseScheduler
from replay.endings import EnvironmentsFail, FilterFails, RewardsFail
from replay.filters import FilterFacts
from replay.journal.format import Frames
from replay.state.answers import ERRORS, ErrorRate, counts_of, kept
from replay.state.apply import record
from replay.state.leases import GroupId, Slot, SlotState
from replay.state.line import PolicyVersion
from replay.state.peers import Peer, Peers
from replay.state.run import RunState
from replay.state.validation import Bounds, problem_with
from slipstream.runtime.variants import Variant

log = logging.getLogger(__name__)

AckStatus = Literal["accepted", "superseded", "rejected", "missing"]


class GroupIntake:
    """Accepts the first valid group of each prompt (invariant 2)."""

    def __init__(self, run: RunState, peers: Peers, leasing: LeaseScheduler, *, fail: Callable[[str], None]) -> None:
        self.run, self.peers, self.leasing = run, peers, leasing
        self.error_rates = {code: ErrorRate(run.config.reward.max_error_rate) for code in ERRORS}
        self.early: set[tuple[str, GroupId, int]] = set()
        """(sender, group, attempt) that came before the commit of its policy did; asked for again after the next."""
        self._fail = fail
        chosen = run.config.algorithm.dynamic_sampling
        self._filter = None if chosen is None else filters.FILTERS.build(chosen)

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
        elif kept(group).rewards.size < self.run.config.min_group:
            self._too_few(peer, slot, group)
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
        """A server gives a lease up."""
        slot = self.run.buffer.slots.get((cancel.pass_, cancel.index))
        if slot is not None and self._holds(peer, slot, cancel.attempt):
            self._give_up(peer, slot, cancel.reason, cancel.detail)

    def _give_up(self, peer: Peer, slot: Slot, reason: str, detail: str, **counted: object) -> None:
        self.leasing.bounded.warning(
            reason if reason in RELEASES else "other", "replay: %r gave up group %s (attempt %d): %s: %s",
            peer.name, slot.group_id, slot.attempt, reason, detail,
        )  # fmt: skip
        self.leasing.release(slot, reason, detail, **counted)

    def _too_few(self, peer: Peer, slot: Slot, group: m.Group) -> None:
        """Too many answers of a group failed: its prompt is leased again, and the errors are counted once."""
        code = next(code for code in group.errors if code)
        few = f"{kept(group).rewards.size} of {group.rewards.size} answers are valid, the first error: "
        detail = f"{few}{group.error_detail}"
        self._ack(peer, group, "rejected", f"{code}: {detail}")
        if self._holds(peer, slot, group.attempt):
            self._give_up(peer, slot, code, detail, answers=counts_of(group))
            self._judge_errors(group)

    def _judge_errors(self, group: m.Group) -> None:
        """Count a group's answers by what failed; too large a share ends the run."""
        for code, rate in self.error_rates.items():
            failed = group.errors.count(code)
            rate.add(group.rewards.size, failed)
            if failed:
                self.leasing.bounded.warning(
                    f"failed: {code}", "replay: %d of %d answers of group %s failed: %s: %s",
                    failed, group.rewards.size, (group.pass_, group.index), code, group.error_detail,
                )  # fmt: skip
            if failed and rate.is_too_high:
                self._too_many_errors(code, rate, group.error_detail)

    def _too_many_errors(self, code: str, rate: ErrorRate, detail: str) -> None:
        config = self.run.config
        what, ending = {
            "reward_error": (f"reward function {config.reward.shown!r}", RewardsFail),
            "environment_error": (f"environment {config.environment.name!r}", EnvironmentsFail),
        }[code]
        text = (
            f"{what} failed for {rate.failed} of the last {rate.answers} answers; reward.max_error_rate {rate.limit:g}"
            f" is passed; the last: {detail}"
        )
        self._fail(str(ending(text)))

    def _reject(self, peer: Peer, slot: Slot, group: m.Group, problem: str) -> None:
        self.run.counters["groups_rejected"] += 1
        self.leasing.bounded.warning(
            "rejected", "replay: group %s of %r rejected: %s [corrupt]", slot.group_id, peer.name, problem
        )
        self._ack(peer, group, "rejected", problem)
        if self._holds(peer, slot, group.attempt):
            self.leasing.release(slot, "rejected", problem)

    @staticmethod
    def _holds(peer: Peer, slot: Slot, attempt: int) -> bool:
        return slot.state is SlotState.LEASED and (slot.server, slot.attempt) == (peer.identity, attempt)

    def _judge(self, peer: Peer, slot: Slot, group: m.Group, frames: Frames) -> None:
        """Accept the group if its policies are on the line; one without a commit yet is passed over."""
        buffer, known = self.run.buffer, self.run.policies
        policies = [PolicyVersion(incarnation, version) for incarnation, version in group.policies]
        if not policies:
            policies = [PolicyVersion(peer.incarnation, int(group.versions.max()))]
        if any(known.is_lost(policy) for policy in policies):
            self.run.counters["superseded"] += 1
            self._ack(peer, group, "superseded", "its policy is not on the learner's line any more")
            if slot.server == peer.identity:
                self.leasing.recall(slot)
            return
        committed = {"version": buffer.version, "last_committed": buffer.line.last_committed}
        if any(known.is_unproven(policy, **committed) for policy in policies):
            self.early.add((peer.identity, slot.group_id, group.attempt))
            return
        if slot.state is SlotState.LEASED and slot.server not in (None, peer.identity):
            self.leasing.cancel(slot, str(slot.server), "another server was first")
        self._accept(peer, slot, group, frames or encode(group, "", group.attempt))

    def _accept(self, peer: Peer, slot: Slot, group: m.Group, frames: Frames) -> None:
        fields: dict[str, object] = {
            "group": list(slot.group_id), "attempt": group.attempt, "server": peer.identity,
            "answers": counts_of(group),
        }  # fmt: skip
        trained = self.run.journal.set_apart(kept(group))
        if trained.routing_place:
            journalled = replace(
                group,
                routing=trained.routing,
                prompt_routing=trained.prompt_routing,
                routing_sums=trained.routing_sums,
                routing_place=trained.routing_place,
            )
            frames = encode(journalled, "", group.attempt)
        if self.run.source.is_rated:  # what the order of prompts depends on is in the journal
            fields["solved"] = float(np.mean(trained.rewards >= self.run.config.evaluation.solved_at))
        record(self.run, "group", fields, frames)
        slot.group = trained
        peer.groups_accepted += 1
        self._ack(peer, group, "accepted")
        self._judge_errors(group)
        if self._filter is None or self._is_kept(self._filter, trained):
            return
        most = self.run.config.algorithm.max_flat_drops * self.run.buffer.groups_per_step
        if self.run.flat_drops < most:
            self.leasing.drop(slot, self._filter.facts.reason)
        else:
            self.run.counters["flat_groups_kept"] += 1

    def _is_kept(self, variant: Variant[FilterFacts], group: m.Group) -> bool:
        try:
            return filters.keeps(variant, group)
        except FilterFails as error:
            self._fail(str(error))
            return True

    def _problem_with(self, group: m.Group, slot: Slot) -> str | None:
        bounds = Bounds(self.run.newest_possible, self.leasing.vocab_size, self.leasing.experts)
        return problem_with(group, slot, self.run.config, bounds)

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
