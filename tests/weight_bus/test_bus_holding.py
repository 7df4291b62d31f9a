"""Engines that finish an evaluation first, and ends whose data planes do not fit: over real sockets."""

import threading
import time

import pytest

from tests.support.bus_receiver import CONFIG, Engine, Rollout, Weights, once, publish, servers, until
from weight_bus import Event, Publisher, RemovedFromBus
from weight_bus.membership import State
from weight_bus.transports import differing
from weight_bus.transports.base import PROTOCOL
from weight_bus.transports.gloo import Collective

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
    held, done = evaluating(publisher, limit_s=30.0)
    (quick,) = servers(publisher, "quick", config=QUICK)
    report = publish(publisher, 1)
    assert (report.served, report.failed) == (["quick"], {}) and report.held.keys() == {"held"}
    assert "'held' (pid" in report.held["held"] and "evaluation of version 0" in report.held["held"]
    report = publish(publisher, 2)
    assert (report.served, report.failed) == (["quick"], {}), "newer versions are not held up either"
    time.sleep(QUICK.deadline_s + 1.0)
    assert publisher.members()["held"] == (State.HOLDING.value, -1), "not slow: it has asked for longer"
    done.set()
    until(lambda: publisher.members()["held"] == ("live", 2), "it applies, and gets what came meanwhile")
    assert held.engine.activated == [1, 2] and quick.engine.activated == [1, 2]
    assert publisher.stats()["lost_peers"] == 0
    assert [event.detail for event in events if event.kind == "held"] == ["evaluation of version 0"]


def test_an_engine_that_holds_for_longer_than_it_asked_is_slow(publisher):
    _, done = evaluating(publisher, limit_s=2.0)
    events: list[Event] = []
    publisher.on_event.append(events.append)
    started = time.monotonic()
    publish(publisher, 1)
    until(lambda: "held" not in publisher.members(), "it is removed")
    assert time.monotonic() - started > 1.9
    (removed,) = [event for event in events if event.kind == "removed"]
    assert removed.symptom == "slow" and "holding an older version before it applies v1" in removed.detail
    done.set()
    until(lambda: publisher.members().get("held") == ("live", 1), "it joins anew with what it verified")


def test_a_hold_for_longer_than_a_day_is_one_for_a_day(publisher, caplog):
    """A deadline of an evaluation may be as long as somebody likes."""
    caplog.set_level("INFO")
    _, done = evaluating(publisher, 1e9)
    assert publish(publisher, 1).held.keys() == {"held"}
    assert "at most 86400 s: evaluation of version 0" in caplog.text
    assert publisher._board.membership.members["held"].deadline < time.monotonic() + 86_401
    done.set()


@pytest.mark.parametrize("limit_s", [0.0, -1.0, float("nan")])
def test_a_hold_without_a_sensible_limit_changes_nothing(publisher, limit_s):
    _, done = evaluating(publisher, limit_s)
    report = publish(publisher, 1)
    assert report.held == {} and "[slow]" in report.failed["held"]
    done.set()


def test_a_data_plane_that_does_not_fit_is_refused_before_anything_collective(publisher, caplog):
    class Stating(Collective):
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


def test_every_differing_fact_is_named_with_both_values_and_a_remedy():
    ours = {"backend": "nccl", "nccl": "2.28.9", "protocol": "1", "NCCL_NVLS_ENABLE": "0", "ucc": "native"}
    theirs = {"backend": "gloo", "nccl": "2.27.5", "protocol": "2", "NCCL_NVLS_ENABLE": "0", "X": "1", "ucc": "plugin"}
    text = differing(ours, theirs)
    assert "backend is gloo there and nccl here, give both ends the same weight_bus.backend" in text
    assert "nccl is 2.27.5 there and 2.28.9 here, install the same PyTorch and NCCL on both" in text
    assert "protocol is 2 there and 1 here" in text and "X is 1 there and not stated here" in text
    assert "ucc is plugin there and native here, install the same UCC on both" in text
    assert "NVLS" not in text
    assert differing(ours, dict(ours)) == ""
