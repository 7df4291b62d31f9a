"""The membership state machine: legal moves, fencing of sessions and epochs, removal; by example and at random."""

import copy
import math
import random
from typing import Any

import pytest

from weight_bus.membership import ENGAGED, IDLE, Group, Member, Membership, State
from weight_bus.messages import Applied, Holding, Join, Staged

SILENT_AFTER_S = 3.0
MAX_FAULTS = 2


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
    epoch = membership.invite(membership.main, members, 0.0, 10.0)
    for member in members:
        assert membership.ready(member.session, epoch, 0.0)
    membership.begin(membership.main, members, (1, "d1"), 0.0, 10.0)
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


def test_who_is_sent_a_version_and_with_whom():
    membership = made()
    a, b, c, d = (admitted(membership, asks(name)) for name in "abcd")

    def sends(group: Group, *members: Member, version: int) -> None:
        """The next round is this one, and all get it."""
        assert membership.next_round(version, 0.0) == (group, [*members])
        if group.sessions != tuple(member.session for member in members):
            epoch = membership.invite(group, members, 0.0, 10.0)
            assert all(membership.ready(member.session, epoch, 0.0) for member in members)
        membership.begin(group, members, (version, f"d{version}"), 0.0, 10.0)
        for member in members:
            about: dict[str, Any] = {"session": member.session, "epoch": member.epoch, "version": version}
            assert membership.staged(Staged(**about), 0.0, 9.0) and member.has(version)
            assert membership.applied(Applied(**about, digest=f"d{version}"), 0.0)

    main, beside = membership.main, membership.beside
    sends(main, a, b, c, d, version=1)
    e = admitted(membership, asks("e"))
    sends(beside, e, version=1)
    sends(main, a, b, c, d, version=2)
    sends(beside, e, version=2)
    assert (main.epoch, beside.epoch) == (1, 2)
    f = admitted(membership, asks("f"))  # a second wave
    sends(main, a, b, c, d, version=3)
    sends(beside, e, f, version=3)
    assert (main.epoch, beside.epoch) == (1, 3)
    g, h = (admitted(membership, asks(name)) for name in "gh")
    sends(main, a, b, c, d, e, f, g, h, version=4)  # as many are outside
    assert (main.epoch, beside.sessions) == (4, ())
    new = [admitted(membership, asks(name)) for name in "ij"]
    sends(beside, *new, version=4)
    sends(main, a, b, c, d, e, f, g, h, version=5)
    sends(beside, *new, version=5)
    membership.remove(f, rejoin=True)
    sends(main, a, b, c, d, e, g, h, *new, version=6)  # one is lost
    membership.remove(new[-1], rejoin=True)
    k = admitted(membership, asks("k"))
    a.state = State.APPLYING
    sends(main, b, c, d, e, g, h, new[0], k, version=7)  # one is slow
    a.state = State.LIVE
    sends(beside, a, version=7)
    sends(main, b, c, d, e, g, h, new[0], k, version=8)


def test_half_of_all_are_not_beside_a_group():
    membership = made()
    a = admitted(membership, asks("a"))
    receiving(membership, a)
    b = admitted(membership, asks("b"))
    assert membership.next_round(1, 0.0) == (membership.beside, [b])
    a.state, a.version = State.LIVE, 1
    assert membership.next_round(2, 0.0) == (membership.main, [a, b])


@pytest.mark.parametrize(("version", "digest", "state"), [(4, "d4", State.LIVE), (4, "d3", State.WAITING)])
def test_who_joins_with_the_present_version_needs_its_digest(version, digest, state):
    joined = admitted(made(), asks("one", version=version, digest=digest), 0.0, version=4, digest="d4")
    assert joined.state is state


def test_silence_and_slowness_are_told_apart():
    membership = made()
    quiet, slow = admitted(membership, asks("quiet")), admitted(membership, asks("slow"))
    membership.invite(membership.main, [slow], 0.0, 5.0)
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
        group, receivers = self.membership.next_round(self.version, self.now)
        if receivers and group.sessions != tuple(m.session for m in receivers):
            self.membership.invite(group, receivers, self.now, self.now + 5)
        elif receivers:
            self.membership.begin(group, receivers, (self.version, f"d{self.version}"), self.now, self.now + 5)

    def answer_epoch(self) -> None:
        session, epoch = self.session(), self.membership.epoch - self.back()
        member = self.membership.find(session)
        legal = member is not None and member.state is State.INVITED and member.epoch == epoch
        assert self.membership.ready(session, epoch, self.now) == legal

    def begin(self) -> None:
        for group in (self.membership.main, self.membership.beside):
            members = self.membership.members.values()
            ready = [m for m in members if m.state is State.READY and m.epoch == group.epoch]
            if ready:
                self.membership.begin(group, ready, (self.version, f"d{self.version}"), self.now, self.now + 5)

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
            found = self.membership.holding(Holding(**about, limit_s=60.0, reason="r", stages=right), self.now)
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
        for member in self.membership.next_round(self.version, self.now)[1]:
            assert not member.has(self.version)
            assert member.state in IDLE or (member.state is State.HOLDING and member.stages)
        assert self.membership.epoch >= self.highest_epoch
        self.highest_epoch = self.membership.epoch
        sessions = [member.session for member in members]
        assert len(set(sessions)) == len(sessions)
        main, beside = set(self.membership.main.sessions), set(self.membership.beside.sessions)
        assert main | beside <= set(sessions) and not main & beside


def test_any_order_of_messages():
    seen = set[State]()
    for seed in range(50):
        run = AtRandom(seed)
        for _ in range(400):
            run.act()
        seen |= run.seen
    assert seen == set(State), "or it shows little"
