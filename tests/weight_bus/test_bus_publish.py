"""Publisher and subscribers over real sockets and real gloo groups; subscribers are threads of this process."""

import threading
import time
from unittest.mock import Mock

import pytest
import torch

from configs.infrastructure import WeightBus
from tests.support.bus_receiver import Engine, Rollout, digests, faulty, learner, once, publish, servers, until, weights
from weight_bus import BusClosed, NonFiniteWeights, RemovedFromBus, WeightBusError
from weight_bus.transports.gloo import GlooCollective


def test_two_subscribers_hold_every_version_and_share_one_epoch(publisher):
    rollouts = servers(publisher, "one", "two")
    for version in range(1, 5):
        report = publish(publisher, version, evaluate=version == 3)
        assert (sorted(report.served), report.failed) == (["one", "two"], {})
        assert report.num_bytes > 0 and {"gather", "queue", "epoch", "send", "apply", "total"} <= report.seconds.keys()
    assert publisher.epoch == 1, "an unchanged membership uses its group again"
    publisher.close("done")
    for rollout in rollouts:
        assert digests(rollout.engine.live) == digests(weights(4))
        assert (rollout.engine.activated, rollout.engine.evaluated) == ([1, 2, 3, 4], [3])
        rollout.join(20.0)
        assert isinstance(rollout.ended, BusClosed) and "done" in str(rollout.ended)


def test_a_version_that_is_live_before_its_sender_has_looked_up_has_all_its_phases(publisher, monkeypatch):
    def finish(*_: object) -> None:
        if threading.current_thread().name.startswith("weight-bus-data"):  # the publisher's, on a busy machine
            until(lambda: publisher.members() == {"one": ("live", 1)}, "the version is live")

    (rollout,) = servers(publisher, "one")
    monkeypatch.setattr(GlooCollective, "finish", finish)
    report = publish(publisher, 1)
    assert report.served == ["one"] and rollout.engine.activated == [1]
    assert [phase for phase, _, _ in report.spans][-3:] == ["epoch", "send", "apply"]
    begun = [begin for _, begin, _ in report.spans]
    assert begun == sorted(begun) and report.seconds["send"] > 0 < report.seconds["apply"] < report.seconds["total"]


def test_a_late_join_is_served_without_the_learners_thread(publisher):
    started = time.monotonic()
    report = publish(publisher, 0)
    assert (report.version, report.served, report.failed, publisher.epoch) == (0, [], {}, 0)
    assert time.monotonic() - started < publisher._config.deadline_s / 2, "nobody is waited for"
    early = Rollout(publisher, "early")
    until(lambda: early.engine.activated == [0], "the first join is filled")
    late = Rollout(publisher, "late")
    until(lambda: late.engine.activated == [0], "the second join is filled")
    assert digests(late.engine.live) == digests(weights(0))
    assert early.engine.loads == 1, "a fill is for the joiner alone"
    assert publisher.stats()["joins"] == 2 and publisher.epoch == 2
    assert sorted(publish(publisher, 1).served) == ["early", "late"]
    assert publisher.epoch == 3
    early.halt()
    until(lambda: publisher.members() == {"late": ("live", 1)}, "who says goodbye is gone")
    assert publisher.stats()["lost_peers"] == 0, "and was not found silent"


def test_a_byte_flipped_on_the_wire_is_named_and_sent_again(publisher, caplog):
    flips = iter([1, 1])

    def flip(bucket: torch.Tensor) -> None:
        if next(flips, 0):
            bucket[1000] ^= 1

    (hit,), (spared,) = servers(publisher, "hit", factory=faulty(1, flip)), servers(publisher, "spared")
    report = publish(publisher, 1)
    assert sorted(report.served) == ["hit", "spared"] and report.failed == {}
    assert publisher.stats()["corrupt"] == 2 and publisher.stats()["heals"] == 1
    assert "'hit' (pid" in caplog.text and "corrupt tensors: layers.2.weight [corrupt]" in caplog.text
    assert hit.engine.loads == 1 and spared.engine.loads == 1, "corrupt bytes never reach an engine"
    assert digests(hit.engine.live) == digests(weights(1))


def test_non_finite_weights_are_refused_and_the_last_version_stays(publisher):
    publish(publisher, 0)
    for bad in (float("nan"), float("inf"), float("-inf")):
        named = weights(1)
        named["layers.4.weight"][3, 5] = bad
        with pytest.raises(NonFiniteWeights, match=r"layers\.4\.weight"):
            publisher.start_publish(1, named.items(), digests(named))
    assert publisher.version == 0
    rollout = Rollout(publisher, "late")
    until(lambda: rollout.engine.activated == [0], "version 0 is still served")
    assert digests(rollout.engine.live) == digests(weights(0))
    assert publish(publisher, 1).served == ["late"]


def test_wait_is_bounded_and_a_slow_engine_comes_back_without_a_refill(config):
    config = config.model_copy(update={"deadline_s": 1.5})
    release = threading.Event()
    with learner(config) as publisher:
        (slow,) = servers(publisher, "slow", engine=Engine(once(lambda _: release.wait(20.0))), config=config)
        (quick,) = servers(publisher, "quick", config=config)
        started = time.monotonic()
        report = publish(publisher, 1)
        assert 1.0 < time.monotonic() - started < 8.0
        assert report.served == ["quick"]
        assert all(words in report.failed["slow"] for words in ("'slow' (pid", "applying v1", "[slow]"))
        assert report.late == ("slow",)
        until(lambda: "slow" not in publisher.members(), "the slow engine is removed")
        rounds = publisher.stats()["rounds"]
        release.set()
        until(lambda: publisher.members().get("slow") == ("live", 1), "it joins anew with what it verified")
        assert publisher.stats()["rounds"] == rounds and slow.engine.loads == 1
        assert sorted(publish(publisher, 2).served) == ["quick", "slow"]
        assert quick.engine.activated == slow.engine.activated == [1, 2]


def test_a_newer_version_supersedes_what_was_not_sent(publisher):
    release = threading.Event()
    (rollout,) = servers(publisher, "one", engine=Engine(once(lambda _: release.wait(20.0))))
    for version in (1, 2, 3, 4):
        publisher.start_publish(version, weights(version).items(), digests(weights(version)))
        if version == 1:
            until(lambda: rollout.engine.loads == 1, "version 1 is being applied")
    assert publisher.wait(0.1).served == []
    release.set()
    assert publisher.wait().served == ["one"]
    assert rollout.engine.activated == [1, 4]
    assert digests(rollout.engine.live) == digests(weights(4))


def test_a_failure_of_the_bus_thread_is_raised_with_its_cause():
    explode = Mock(side_effect=KeyError("not a transport error"))
    with learner(transport_factory=faulty(0, explode, before=True)) as publisher:
        (rollout,) = servers(publisher, "one")
        with pytest.raises(WeightBusError, match="not a transport error") as raised:
            publish(publisher, 1)
        assert isinstance(raised.value.__cause__, KeyError)
        with pytest.raises(WeightBusError):
            publish(publisher, 2)
        rollout.join(20.0)
        assert isinstance(rollout.ended, BusClosed)


def test_the_newest_of_two_subscribers_with_one_name_wins(publisher):
    (old,) = servers(publisher, "same")
    new = Rollout(publisher, "same")
    old.join(20.0)
    assert isinstance(old.ended, RemovedFromBus) and "[duplicate]" in str(old.ended)
    assert publish(publisher, 1).served == ["same"]
    assert new.engine.activated == [1] and old.engine.activated == []


def test_another_run_is_refused_with_both_names(publisher):
    stranger = Rollout(publisher, "one", run_id="other-run")
    stranger.join(20.0)
    assert isinstance(stranger.ended, RemovedFromBus) and "run 'bus-test', not 'other-run'" in str(stranger.ended)
    assert publisher.members() == {}


def test_a_backend_that_is_not_here_is_refused_by_name():
    config = WeightBus(backend="nccl")
    with pytest.raises(WeightBusError, match=r"nccl.*take weight_bus\.backend: gloo"):
        learner(config)
    with pytest.raises(WeightBusError, match="nccl"):
        Rollout("tcp://127.0.0.1:1", "one", config=config)


def test_misuse_is_refused(publisher):
    with pytest.raises(WeightBusError, match="before start_publish"):
        publisher.wait()
    publish(publisher, 3)
    with pytest.raises(ValueError, match="version 3 is not above 3"):
        publish(publisher, 3)
    with pytest.raises(ValueError, match="digests do not match"):
        publisher.start_publish(4, weights(4).items(), {"layers.0.weight": 1})
    publisher.close()
    with pytest.raises(WeightBusError, match="closed"):
        publish(publisher, 5)
