"""Engines that finish an evaluation first, and ends whose data planes do not fit: over real sockets."""

import threading
import time

import pytest

from tests.support.bus_receiver import CONFIG, Engine, Rollout, Weights, once, publish, servers, until
from weight_bus import Event, Publisher, RemovedFromBus
from weight_bus.coordinator import MAX_HOLD_S
from weight_bus.membership import State
from weight_bus.transports.base import PROTOCOL
from weight_bus.transports.gloo import GlooCollective

QUICK = CONFIG.model_copy(update={"deadline_s": 1.5})


@pytest.fixture
def config():
    return QUICK


def evaluating(publisher: Publisher, limit_s: float) -> tuple[Rollout, threading.Event]:
    """A server whose first load waits for an event, after it has said for how long."""
    done = threading.Event()

    def hold(live: Weights) -> None:
        held.subscriber.hold(limit_s, "evaluation of version 0")
        done.wait(20.0)

    (held,) = servers(publisher, "held", engine=Engine(once(hold)), config=QUICK)
    return held, done


def test_an_engine_that_holds_is_not_waited_for_and_becomes_live_afterwards(publisher):
    events: list[Event] = []
    publisher.on_event.append(events.append)
    held, done = evaluating(publisher, limit_s=1e9)
    (quick,) = servers(publisher, "quick", config=QUICK)
    report = publish(publisher, 1)
    assert (report.served, report.failed) == (["quick"], {}) and report.held.keys() == {"held"}
    assert "'held' (pid" in report.held["held"] and "evaluation of version 0" in report.held["held"]
    assert publisher._board.membership.members["held"].deadline < time.monotonic() + MAX_HOLD_S
    report = publish(publisher, 2)
    assert (report.served, report.failed) == (["quick"], {}), "newer versions are not held up either"
    time.sleep(QUICK.deadline_s + 1.0)
    assert publisher.members()["held"] == (State.HOLDING.value, -1), "not slow: it has asked for longer"
    done.set()
    until(lambda: publisher.members()["held"] == ("live", 2), "it applies, and gets what came meanwhile")
    assert held.engine.activated == [1, 2] and quick.engine.activated == [1, 2]
    assert publisher.stats()["lost_peers"] == 0
    assert [event.detail for event in events if event.kind == "held"] == ["evaluation of version 0"]


def epochs(*servers: Rollout) -> list[int]:
    return [server.subscriber.subscription.epoch for server in servers]


def test_an_engine_that_evaluates_stays_in_the_group_and_stages_and_costs_nobody_an_epoch(publisher):
    held, quick, other = servers(publisher, "held", "quick", "other", config=QUICK)
    assert len(publish(publisher, 1).served) == 3
    held.engine.busy = (60.0, "evaluates v1")
    for version in (2, 3, 4):
        report = publish(publisher, version)
        assert (report.served, report.failed) == (["quick", "other"], {}) and report.held.keys() == {"held"}
    assert publisher._board.membership.members["held"].deadline > time.monotonic() + 2 * QUICK.deadline_s, "not slow"
    assert publisher.members()["held"] == (State.HOLDING.value, -1) and held.subscriber.version == 1
    held.engine.busy = None
    until(lambda: publisher.members()["held"] == ("live", 4), "it applies what it has staged")
    assert held.engine.activated == [1, 4] and quick.engine.activated == other.engine.activated == [1, 2, 3, 4]
    assert sorted(publish(publisher, 5).served) == ["held", "other", "quick"]
    assert epochs(held, quick, other) == [1, 1, 1] and publisher.stats()["lost_peers"] == 0
    assert publisher.stats()["rounds"] == 5, "it was never sent a version for itself"


def test_a_version_to_be_evaluated_itself_is_not_staged_over(publisher):
    held, *_ = servers(publisher, "held", "quick", "other", config=QUICK)
    publish(publisher, 1)
    held.engine.busy = (60.0, "evaluates v1")
    publish(publisher, 2, evaluate=True)
    assert publish(publisher, 3).held.keys() == {"held"}
    held.engine.busy = None
    until(lambda: publisher.members()["held"] == ("live", 3), "it is filled")
    assert held.engine.activated == [1, 2, 3] and held.engine.evaluated == [2]


def test_a_newcomer_is_filled_beside_the_others_and_enters_at_the_next_epoch(publisher):
    first, second = servers(publisher, "first", "second", config=QUICK)
    publish(publisher, 1)
    (late,) = servers(publisher, "late", config=QUICK)
    until(lambda: late.engine.activated == [1], "it is filled")
    for version in (2, 3):
        assert len(publish(publisher, version).served) == 3
    assert epochs(first, second) == [1, 1] and epochs(late) == [2], "and its own group goes on"
    (later,) = servers(publisher, "later", config=QUICK)
    until(lambda: later.engine.activated == [3], "it is filled")
    assert epochs(first, second, late) == [1, 1, 2]
    for version in (4, 5):
        assert len(publish(publisher, version).served) == 4
    assert epochs(first, second, late, later) == [4, 4, 4, 4], "all in one, which goes on"
    late.halt()
    until(lambda: "late" not in publisher.members(), "one leaves")
    assert len(publish(publisher, 6).served) == 3 and epochs(first, second, later) == [5, 5, 5]
    assert publisher.stats()["lost_peers"] == 0 and late.engine.activated == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan")])
def test_a_hold_without_a_sensible_limit_changes_nothing(publisher, limit_s):
    _, done = evaluating(publisher, limit_s)
    report = publish(publisher, 1)
    assert report.held == {} and "is applying v1" in report.failed["held"] and "[slow]" in report.failed["held"]
    done.set()


def test_a_data_plane_that_does_not_fit_is_refused_before_anything_collective(publisher, caplog):
    class Stating(GlooCollective):
        def facts(self) -> dict[str, str]:
            return {"backend": "gloo", "protocol": PROTOCOL, "NCCL_CUMEM_ENABLE": "1"}

    misfit = Rollout(publisher, "misfit", factory=Stating, config=QUICK)
    misfit.join(20.0)
    assert isinstance(misfit.ended, RemovedFromBus)
    text = str(misfit.ended)
    assert "'misfit' on " in text and "NCCL_CUMEM_ENABLE is 1 there and not stated here" in text
    assert "set NCCL_CUMEM_ENABLE alike on all nodes (network.env)" in text and "protocol" not in text
    assert "cannot be in a group with the publisher" in caplog.text
    assert publisher.members() == {} and publisher.epoch == 0
    servers(publisher, "good", config=QUICK)
    assert publish(publisher, 1).served == ["good"], "others are served"
