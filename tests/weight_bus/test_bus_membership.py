"""The membership state machine: legal moves, fencing of sessions and epochs, removal; by example and at random."""

import copy
import math
import random
from typing import Any

import pytest

from weight_bus.membership import IDLE, Member, Membership, State
from weight_bus.messages import Applied, Holding, Join, Staged

SILENT_AFTER_S = 3.0
MAX_FAULTS = 2
ENGAGED = (State.APPLYING, State.HOLDING)


def made() -> Membership:
    return Membership(silent_after_s=SILENT_AFTER_S, max_faults=MAX_FAULTS)


def asks(name: str, number: int = 1, *, instance: str = "", **stated: Any) -> Join:
    instance = instance or f"i-{name}"
    return Join(session=f"{instance}-{number}", name=name, instance=instance, pid=1, host="h", **stated)


def admitted(membership: Membership, join: Join, now: float = 0.0, version: int = -1, digest: str = "") -> Member:
    member = membership.join(join, f"id-{join.name}", now, version=version, digest=digest).member
    assert member is not None
    return member


def receiving(membership: Membership, *members: Member) -> int:
    """Version 1, in an epoch of these; its number."""
    epoch = membership.invite(members, 0.0, 10.0)
    for member in members:
        assert membership.ready(member.session, epoch, 0.0)
    membership.begin(members, (1, "d1"), 0.0, 10.0)
    return epoch


def test_a_session_of_another_name_is_refused():
    membership = made()
    one = admitted(membership, asks("one"))
    thief = Join(session=one.session, name="two", instance="i-two", pid=2, host="h")
    assert "is that of 'one'" in membership.join(thief, "id-two", 0.0, version=-1, digest="").refused
    membership.remove(one, rejoin=True)
    assert not membership.members and membership.find(one.session) is None


def test_faults_outlive_a_session_and_end_with_a_verified_version():
    membership = made()
    one = admitted(membership, asks("one"))
    for number in range(MAX_FAULTS + 1):
        assert not membership.hopeless(one)
        epoch = receiving(membership, one)
        membership.staged(Staged(session=one.session, epoch=epoch, version=1, corrupt=["w"]), 0.0, 9.0)
        membership.remove(one, rejoin=True)
        one = admitted(membership, asks("one", number + 2))
    assert membership.hopeless(one)
    epoch = receiving(membership, one)
    membership.staged(Staged(session=one.session, epoch=epoch, version=1), 0.0, 9.0)
    membership.applied(Applied(session=one.session, epoch=epoch, version=1, digest="d1"), 0.0)
    membership.remove(one, rejoin=True)
    assert admitted(membership, asks("one", 9)).faults == 0


def test_a_failing_member_is_kept_apart_from_healthy_ones_and_waits_its_pause():
    membership = made()
    bad, good = admitted(membership, asks("bad")), admitted(membership, asks("good"))
    membership.fault(bad, 5.0)
    assert membership.needing(1, 0.0) == [good]
    assert membership.needing(1, 6.0) == [good], "not even after the pause"
    receiving(membership, good)
    assert membership.needing(1, 4.9) == []
    assert membership.needing(1, 5.0) == [bad]


@pytest.mark.parametrize(("version", "digest", "state"), [(4, "d4", State.LIVE), (4, "d3", State.WAITING)])
def test_who_joins_with_the_present_version_needs_its_digest(version, digest, state):
    joined = admitted(made(), asks("one", version=version, digest=digest), 0.0, version=4, digest="d4")
    assert joined.state is state


def test_silence_and_slowness_are_told_apart():
    membership = made()
    quiet, slow = admitted(membership, asks("quiet")), admitted(membership, asks("slow"))
    membership.invite([slow], 0.0, 5.0)
    assert membership.overdue(SILENT_AFTER_S) == []
    membership.heard(slow.session, slow.identity, 4.0)
    assert membership.overdue(5.5) == [(quiet, "silent", 5.5), (slow, "slow", 5.5)]


class AtRandom:
    """Any order of messages, also late and repeated ones, against what each engine was really shown to hold."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.membership = made()
        self.now = 0.0
        self.version = 0
        self.joins: list[Join] = []
        self.proved: dict[str, int] = {}
        self.highest_epoch = 0
        self.seen = set[State]()

    def act(self) -> None:
        acts = {
            self.join: 3, self.publish: 2, self.time_passes: 2, self.beat: 8, self.send_round: 6,
            self.answer_epoch: 12, self.begin: 6, self.answer: 40, self.remove: 1,
        }  # fmt: skip
        self.rng.choices(list(acts), list(acts.values()))[0]()
        self.check()

    def session(self) -> str:
        """Of a member, mostly, or one that has ended."""
        members = list(self.membership.members)
        if members and self.rng.random() < 0.8:
            return self.membership.members[self.rng.choice(members)].session
        return self.rng.choice(self.joins).session if self.joins else ""

    def back(self) -> int:
        return self.rng.choice([0, 0, 0, 0, 0, 0, 1, 2])

    def join(self) -> None:
        name, holds = self.rng.choice("abc"), self.rng.random() < 0.5
        instance = f"{name}{len(self.joins)}" if self.rng.random() < 0.5 else name
        version, digest = (self.version, f"d{self.version}") if holds else (-1, "")
        join = asks(name, len(self.joins), instance=instance, version=version, digest=digest)
        admission = self.membership.join(join, join.session, self.now, version=self.version, digest=f"d{self.version}")
        assert (admission.member is None) == bool(admission.refused)
        self.joins.append(join)
        if holds:
            self.proved[join.session] = self.version

    def publish(self) -> None:
        self.version += 1

    def time_passes(self) -> None:
        self.now += self.rng.uniform(0.0, SILENT_AFTER_S)
        for member, _, _ in self.membership.overdue(self.now):
            self.membership.remove(member, rejoin=True)

    def beat(self) -> None:
        session = self.session()
        assert self.membership.heard(session, session, self.now) is self.membership.find(session)

    def send_round(self) -> None:
        receivers = self.membership.needing(self.version, self.now)
        if receivers and not self.membership.in_group(receivers):
            self.membership.invite(receivers, self.now, self.now + 5)
        elif receivers:
            self.membership.begin(receivers, (self.version, f"d{self.version}"), self.now, self.now + 5)

    def answer_epoch(self) -> None:
        session, epoch = self.session(), self.membership.epoch - self.back()
        member = self.membership.find(session)
        legal = member is not None and member.state is State.INVITED and member.epoch == epoch
        assert self.membership.ready(session, epoch, self.now) == legal

    def begin(self) -> None:
        ready = [m for m in self.membership.members.values() if m.state is State.READY]
        if ready and all(m.epoch == self.membership.epoch for m in ready):
            self.membership.begin(ready, (self.version, f"d{self.version}"), self.now, self.now + 5)

    def answer(self) -> None:
        """Of a subscriber to a Begin or a Commit, that may be of an older epoch or about an older version."""
        kind, right, session = self.rng.choice([Staged, Applied, Holding]), self.rng.random() < 0.5, self.session()
        member = self.membership.find(session)
        epoch, version = (member.epoch, member.target) if member else (self.membership.epoch, self.version)
        about: dict[str, Any] = {"session": session, "epoch": epoch - self.back(), "version": version - self.back()}
        states = (State.RECEIVING,) if kind is Staged else ENGAGED
        legal = member is not None and member.state in states and (about["epoch"], about["version"]) == (epoch, version)
        before = copy.deepcopy(self.membership.members)
        if kind is Staged:
            found = self.membership.staged(Staged(**about, corrupt=[] if right else ["w"]), self.now, self.now + 5)
        elif kind is Applied:
            found = self.membership.applied(Applied(**about, digest=f"d{version}" if right else "wrong"), self.now)
        else:
            found = self.membership.holding(Holding(**about, limit_s=60.0, reason="r"), self.now)
            assert not legal or member not in self.membership.unsettled(self.version)
        assert (found is not None) == legal
        assert legal or before == self.membership.members, "a late message changed something"
        if legal and right and kind is Applied:
            self.proved[session] = version

    def remove(self) -> None:
        member, rejoin = self.membership.find(self.session()), self.rng.random() < 0.5
        if member is not None:
            self.membership.remove(member, rejoin=rejoin)
            again = asks(member.name, 0, instance=member.instance)
            refused = self.membership.join(again, "x", self.now, version=0, digest="")
            assert bool(refused.refused) == (not rejoin)
            if refused.member is not None:
                self.membership.remove(refused.member, rejoin=True)

    def check(self) -> None:
        members = self.membership.members.values()
        self.seen |= {member.state for member in members}
        for member in members:
            if member.state is State.LIVE:
                assert member.version == self.proved[member.session] >= 0, "it is held only when it was proved"
            if member.state in (*ENGAGED, State.QUARANTINED):
                assert member.version == -1, "an engine that may hold anything serves nothing"
            if member.state in (State.INVITED, State.RECEIVING, *ENGAGED):
                assert member.deadline < math.inf, "every wait has an end"
            if member.state is State.RECEIVING:
                assert member.base == "", "what was staged is written over"
            assert member.heard_at <= self.now
        assert all(m.state in IDLE for m in self.membership.needing(self.version, self.now))
        assert self.membership.epoch >= self.highest_epoch
        self.highest_epoch = self.membership.epoch
        sessions = [member.session for member in members]
        assert len(set(sessions)) == len(sessions)
        assert set(self.membership.group) <= set(sessions)


def test_any_order_of_messages():
    seen = set[State]()
    for seed in range(50):
        run = AtRandom(seed)
        for _ in range(400):
            run.act()
        seen |= run.seen
    assert seen == set(State), "or it shows little"
