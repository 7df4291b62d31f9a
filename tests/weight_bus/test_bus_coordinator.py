"""What the publisher makes of its subscribers' answers, without sockets: called off, superseded and failed ones."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from configs.infrastructure import WeightBus
from replay.channel import Envelope, Message
from tests.weight_bus.test_bus_membership import MAX_FAULTS, admitted, asks, made, receiving
from weight_bus import messages as m
from weight_bus.coordinator import Coordinator
from weight_bus.errors import WeightBusError
from weight_bus.membership import Member, State
from weight_bus.offer import Board, Offer

OFFER = {"evaluate": False, "buffer": 0, "started_at": 0.0, "buckets": [], "progress": Mock()}


class Rig:
    """A coordinator whose members receive version 1."""

    def __init__(self, *names: str) -> None:
        self.sent: list[Message] = []
        router = SimpleNamespace(run_id="r", send=lambda _, message, __="": self.sent.append(message) or "")
        self.board = Board(made())
        self.members = [admitted(self.board.membership, asks(name)) for name in names]
        self.epoch = receiving(self.board.membership, *self.members)
        self.offer(1)
        given: Any = {"router": router, "board": self.board, "facts": {}, "incarnation": 1, "senders": Mock()}
        self.coordinator = Coordinator(WeightBus(), **given)

    def offer(self, version: int) -> None:
        self.board.current = Offer(version=version, digest=f"d{version}", manifests=[], **OFFER)  # type: ignore[arg-type]

    def hears(self, message: Message, run_id: str = "r") -> list[Message]:
        """What it answers."""
        self.sent.clear()
        self.coordinator._handle(f"id-{message.session[2:-2]}", Envelope(run_id, 1, message), 1.0)  # type: ignore
        return self.sent

    def about(self, member: Member) -> dict[str, Any]:
        return {"session": member.session, "epoch": self.epoch, "version": 1}


@pytest.mark.parametrize("way", ["wanted", "called off", "superseded"])
def test_what_is_staged_is_committed_only_while_it_is_wanted(way: str) -> None:
    rig = Rig("one")
    (one,) = rig.members
    if way == "called off":
        rig.board.called_off = (rig.epoch, 1)
    elif way == "superseded":
        rig.offer(2)
    (answer,) = rig.hears(m.Staged(**rig.about(one)))
    assert isinstance(answer, m.Commit if way == "wanted" else m.Abort)
    assert one.state is (State.APPLYING if way == "wanted" else State.WAITING)
    assert rig.hears(m.Staged(**rig.about(one))) == [], "a second word is late"


@pytest.mark.parametrize("names", [("one",), ("one", "two")])
def test_a_broken_broadcast_breaks_the_group_and_is_charged_to_an_only_receiver(names: tuple[str, ...]) -> None:
    """Of several, any may have broken it."""
    rig = Rig(*names)
    one = rig.members[0]
    assert rig.board.membership.uninformed(rig.members, "l") == rig.members
    rig.hears(m.ReceiveFailed(**rig.about(one), reason="its peer is gone"))
    assert one.state is State.WAITING and rig.board.membership.main.sessions == ()
    assert rig.board.membership.uninformed(rig.members, "l") == [one], "it may not have come"
    assert one.faults == (len(names) == 1) == (one.retry_at > 0.0) == (rig.board.current.failed != {})


def test_who_is_at_fault_is_decided_when_the_senders_have_ended() -> None:
    rig = Rig("one")
    (one,) = rig.members
    with rig.coordinator.adjourned() as failed:
        rig.hears(m.ReceiveFailed(**rig.about(one), reason="it cannot meet its sender"))
    assert failed == [(one, "it cannot meet its sender")] and one.faults == 0
    rig.board.membership.remove(one, rejoin=True)
    rig.coordinator.charge(*failed[0])
    assert one.faults == 0, "it was lost meanwhile"


@pytest.mark.parametrize("has_one", [False, True])
def test_a_version_that_reaches_no_engine_is_not_charged_to_the_last_of_them(has_one: bool) -> None:
    rig = Rig("one", "two")
    one, two = rig.members
    one.state = two.state = State.WAITING
    for _ in range(MAX_FAULTS):
        rig.coordinator.charge(one, "a broken lane")
        rig.coordinator.charge(two, "a broken lane")
    if has_one:
        two.state, two.version = State.LIVE, 1
        rig.coordinator.charge(one, "a broken lane")
        assert rig.board.membership.members.keys() == {"two"}
        return
    with pytest.raises(WeightBusError, match=r"v1 reaches none of 2 engines, last .*'one' .*: a broken lane"):
        rig.coordinator.charge(one, "a broken lane")
    assert rig.board.membership.members.keys() == {"one", "two"}


def test_who_does_not_belong_here_is_told_so() -> None:
    """Or it would wait for ever."""
    rig = Rig("one")
    for message, run_id, reason, rejoin in (
        (asks("two"), "another", "this is run 'r', not 'another'", False),
        (asks("two", facts={"backend": "nccl"}), "r", "cannot be in a group with the publisher: backend", False),
        (m.Heartbeat(session="i-gone-1"), "r", "this session has ended", True),
    ):
        (told,) = rig.hears(message, run_id)
        assert isinstance(told, m.Removed) and reason in told.reason and told.rejoin is rejoin
    assert rig.board.membership.members.keys() == {"one"}


def test_a_subscriber_that_fails_once_more_than_it_may_does_not_come_back() -> None:
    rig = Rig("one")
    for _ in range(MAX_FAULTS + 1):
        assert rig.members == [*rig.board.membership.members.values()]
        rig.coordinator.charge(rig.members[0], "a broken disk")
    (told,) = rig.sent
    assert isinstance(told, m.Removed) and not told.rejoin and "failed 3 updates in a row" in told.reason
    assert rig.board.membership.join(asks("one", 2), "id", 0.0, version=1, digest="d1").refused
