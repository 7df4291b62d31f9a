"""Lanes: several senders, several scheduler ranks an engine; what a plan holds, and what a broken lane does."""

import time
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from replay.channel import WireError
from tests.support.bus_lanes import (
    BUS,
    Learner,
    SchedulerProcesses,
    Schedulers,
    cut,
    lanes_of,
    moe,
    slice_digests,
    wanted,
)
from tests.support.bus_receiver import Rollout, digests, faulty, until
from weight_bus import BusClosed, TransportError, WeightBusError
from weight_bus.digest import combined
from weight_bus.errors import NotPacked
from weight_bus.intake import Layouts
from weight_bus.lanes import first_of, joined, plan_lanes, whole, whole_digests
from weight_bus.messages import Begin, Enlist, Send, Sent, described, digest_array, layout_of
from weight_bus.senders import Senders
from weight_bus.transports import make_transport

SIDES = [(1, 1), (2, 1), (1, 2), (3, 2), (2, 4), (4, 2), (2, 2)]


@pytest.mark.parametrize(("senders", "positions"), SIDES)
def test_each_position_gets_all_it_needs_once_in_even_parts(senders, positions):
    lanes = lanes_of(senders, positions)
    assert len(lanes) == max(senders, positions) and {lane.sender for lane in lanes} == set(range(senders))
    for position, slices in enumerate(wanted(positions)):
        its = [lane for lane in lanes if lane.position == position]
        got = [(e.name, e.start, e.shape, e.whole) for lane in its for e in lane.layout.entries]
        assert sorted(got) == sorted((s.name, s.start, s.shape, s.whole) for s in slices)
        sizes = [sum(entry.num_bytes for entry in lane.layout.entries) for lane in its]
        assert max(sizes) - min(sizes) <= max(s.num_bytes for s in slices)


def test_buckets_of_lanes_take_turns():
    lanes = [lane.layout for lane in lanes_of(1, 2)]
    both = joined(lanes)
    assert both.sources[:4] == ((0, 0), (1, 0), (0, 1), (1, 1))
    assert len(both.sources) == sum(len(lane.bucket_sizes) for lane in lanes)
    names = [[entry.name for entry in bucket] for bucket in both.layout.by_bucket()]
    assert names == [[entry.name for entry in lanes[lane].by_bucket()[index]] for lane, index in both.sources]


def test_digests_of_lanes_make_up_those_of_tensors_and_copies_must_agree():
    named, lanes = moe(1), lanes_of(2, 4)
    slices = slice_digests(lanes, named)
    manifests = [
        lane.layout.with_digests({e.name: slices[e.name, e.start] for e in lane.layout.entries}) for lane in lanes
    ]
    assert whole_digests(manifests) == digests(named)
    with pytest.raises(ValueError, match=r"of 'model.embed_tokens.weight' in all lanes do not make it up"):
        whole_digests(manifests[:3])
    manifests[2].digests["model.norm.weight"] ^= 1
    with pytest.raises(ValueError, match=r"two lanes carry other copies of 'model.norm.weight' at"):
        whole_digests(manifests)


@pytest.mark.parametrize(("senders", "positions"), SIDES)
def test_versions_arrive_in_slices_of_each_scheduler_rank(tmp_path, senders, positions):
    with (
        Learner(senders, positions) as learner,
        Schedulers(tmp_path, positions) as one,
        Schedulers(tmp_path, positions) as two,
    ):
        servers = [one.join(learner.publisher, "one"), two.join(learner.publisher, "two")]
        until(lambda: len(learner.publisher.members()) == 2, "both join")
        for version in range(1, 4):
            assert sorted(learner.publish(version).served) == ["one", "two"]
        for server in servers:
            assert server.engine.activated == [1, 2, 3]
            for held, slices in zip(server.engine.ranks, wanted(positions), strict=True):
                assert held.keys() == {s.name for s in slices}
                assert all(torch.equal(held[s.name], cut(moe(3)[s.name], s.start, s.shape)) for s in slices)


def test_a_plain_subscriber_gets_whole_tensors_of_three_senders():
    with Learner(3, 1) as learner:
        server = Rollout(learner.publisher, "rollout-0")
        until(lambda: learner.publisher.members(), "it joins")
        assert learner.publish(1).served == ["rollout-0"]
        assert digests(server.engine.live) == digests(moe(1))


def test_two_waves_of_newcomers_are_filled_in_lanes_beside_those_of_the_others():
    with Learner(3, 1) as learner:
        servers = [Rollout(learner.publisher, f"rollout-{n}") for n in range(3)]
        until(lambda: len(learner.publisher.members()) == 3, "all join")
        learner.publish(1)
        for version in (1, 2):
            servers.append(Rollout(learner.publisher, f"late-{version}"))
            until(lambda version=version: servers[-1].engine.activated == [version], "it is filled")
            assert len(learner.publish(version + 1).served) == len(servers)
        assert [server.subscriber.subscription.epoch for server in servers] == [1, 1, 1, 4, 4], "2 and 3 are of a fill"
        assert all(digests(server.engine.live) == digests(moe(3)) for server in servers)
    for server in servers:
        server.join(10.0)


def test_processes_load_their_slices_into_fused_live_tensors_in_the_memory_that_arithmetic_says():
    size = sum(tensor.nbytes for tensor in moe(0).values())
    with Learner(2, 2, processes=True) as learner, SchedulerProcesses(2) as schedulers:
        server = schedulers.join(learner.publisher, "rollout-0")
        until(lambda: learner.publisher.members(), "it joins", 60.0)
        for version in (1, 2, 3):
            assert learner.publish(version).served == ["rollout-0"], server.engine.quarantined
        for slices, rank in zip(wanted(2), schedulers.memory, strict=True):
            needs = sum(piece.num_bytes for piece in slices)
            assert needs <= rank["buckets"] <= needs + 64 * len(slices) <= 0.6 * size
        packed = [learner.senders[1].hear() for _ in range(3)][-1]["buckets"]
        (mine,) = (sum(lane.layout.bucket_sizes) for lane in learner.lanes if lane.sender == 1)
        assert packed == 2 * mine <= 1.2 * size, "two sets of its half"


def test_the_first_buckets_of_a_lane_are_small():
    (lane,) = plan_lanes([[whole(f"t{i}", "bfloat16", (1000,)) for i in range(100)]], 1, 64_000)
    sizes = lane.layout.bucket_sizes
    assert sizes[0] <= 8_000 < sizes[1] <= 16_000 < sizes[2] <= 32_000 < max(sizes) <= 64_000
    assert layout_of(described(lane.layout, 64_000, 3, 8_000)) == lane.layout


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda begins: begins, ""),
        (lambda begins: [replace(one, digest="d") for one in begins], "digest d is not that of what its lanes carry"),
        (
            lambda begins: [replace(one, position=0) for one in begins],
            "lanes to the same scheduler rank carry the same",
        ),
        (lambda begins: [*begins[:2], replace(begins[0], lane=2)], "layout .* has not come"),
    ],
)
def test_lanes_that_do_not_make_up_their_version_are_refused(spoil, said):
    named, lanes = moe(1), lanes_of(2, 2)
    slices, layouts = slice_digests(lanes, named), Layouts()
    version: dict = {"epoch": 1, "version": 1, "incarnation": 1, "evaluate": False, "ranks": {"s": 1}, "size": 2}
    begins = []
    for lane in lanes:
        manifest = lane.layout.with_digests({e.name: slices[e.name, e.start] for e in lane.layout.entries})
        layouts.learn(described(lane.layout, BUS.bucket_bytes, lane.number, first_of(BUS.bucket_bytes)), 64)
        its: dict = {"lane": lane.number, "lanes": 2, "position": lane.position, "layout": lane.layout.id}
        all_of: dict = {"digest": combined(digests(named)), "bucket_bytes": BUS.bucket_bytes, "endpoint": "e"}
        begins.append(Begin(digests=digest_array(manifest), **version, **its, **all_of))
    if not said:
        assert layouts.read(begins)[1].digests == digests(named)
        return
    with pytest.raises(WireError, match=said):
        layouts.read(spoil(begins))


class TestSenders:
    """What rank 0 makes of other learner ranks."""

    ENLIST = Enlist(session="secret", rank=1, endpoints=["a", "b"], facts={"backend": "gloo"})
    ORDER = Send(session="secret", epoch=3, version=7, size=2, fresh=True)

    def made(self, symptom=""):
        self.sent = []
        router: Any = SimpleNamespace(send=lambda identity, order: self.sent.append((identity, order)) or symptom)
        return Senders(router, lanes_of(2, 2), "secret", {"backend": "gloo"}, lambda **_: ["own"], 5.0)

    def test_only_ranks_of_this_learner_enlist_with_a_transport_like_its_own(self):
        senders = self.made()
        senders.hear("x", replace(self.ENLIST, session="guessed"))
        assert senders.missing == [1]
        with pytest.raises(WeightBusError, match="learner rank 1 differs from rank 0: backend is ucc there"):
            senders.hear("x", replace(self.ENLIST, facts={"backend": "ucc"}))
        senders.hear("x", self.ENLIST)
        assert senders.missing == [] and [senders.of_lane(n, False)["endpoint"] for n in (0, 1)] == ["own", "a"]

    def test_an_order_is_repeated_until_its_answer(self):
        senders = self.made()
        senders.hear("x", self.ENLIST)
        future = senders.send(1, self.ORDER)
        senders.remind(time.monotonic() + 60)
        assert [identity for identity, _ in self.sent] == ["x", "x"] and not future.done()
        answer = Sent(session="secret", epoch=3, version=7, number=self.sent[0][1].number)
        senders.hear("x", replace(answer, number=99))
        assert not future.done()
        senders.hear(
            "x", replace(answer, reason="not packed", symptom="slow", code=NotPacked.code, endpoints=["c", "d"])
        )
        assert isinstance(future.exception(0), NotPacked) and senders.of_lane(1, False)["endpoint"] == "c"
        senders.remind(time.monotonic())
        assert len(self.sent) == 2

    def test_a_rank_that_cannot_be_reached_ends_the_learner(self):
        senders = self.made("closed")
        senders.hear("x", self.ENLIST)
        future = senders.send(1, self.ORDER)
        senders.remind(time.monotonic() + 4)
        assert not future.done()
        senders.remind(time.monotonic() + 6)
        failure = future.exception(0)
        assert isinstance(failure, WeightBusError) and "cannot reach learner rank 1" in str(failure)


@pytest.mark.parametrize("lane", [0, 1])
def test_a_lane_that_tears_is_built_again_and_its_learner_rank_named(tmp_path, caplog, lane):
    torn = []

    def tear(bucket):
        if learner.publisher.version == 2 and not torn:
            torn.append(bucket)
            raise TransportError("the cable is cut", "closed")

    def factory(config, host):
        made.append(faulty(1, tear, before=True)(config, host))
        return made[-1] if len(made) - 1 == lane else make_transport(config, host)

    made = []
    with Learner(2, 2, factory=factory) as learner, Schedulers(tmp_path, 2) as schedulers:
        server = schedulers.join(learner.publisher, "rollout-0")
        until(lambda: learner.publisher.members(), "it joins")
        assert [learner.publish(version).served for version in (1, 2, 3)] == 3 * [["rollout-0"]]
        assert server.engine.activated == [1, 2, 3] and torn and not server.engine.quarantined
    assert f"lane {lane}, from learner rank {lane} to scheduler rank {lane}: the cable is cut" in caplog.text


@pytest.mark.parametrize("lane", [0, 1])
def test_a_sender_whose_meeting_point_is_lost_opens_another_and_no_engine_is_charged(caplog, lane):
    made, events = [], []

    def lose_store(bucket):
        if learner.publisher.version == 2 and learner.publisher.stats()["epochs"] == 1:
            made[lane].leave()
            meeting = made[lane]._meeting
            host, _, port = meeting.serve().rpartition(":")
            meeting._store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)  # it ends unheld
            raise TransportError("the cable is cut", "closed")

    def factory(config, host):
        made.append(faulty(0, lose_store if len(made) == lane else lambda _: None, before=True)(config, host))
        return made[-1]

    with Learner(2, 1, factory=factory) as learner:
        server = Rollout(learner.publisher, "rollout-0", config=BUS)
        until(lambda: learner.publisher.members(), "it joins")
        learner.publisher.on_event.append(lambda event: events.append(event.kind))
        assert [learner.publish(version).served for version in (1, 2, 3)] == 3 * [["rollout-0"]]
        assert server.subscriber.subscription.epoch == 2 and not {"failed", "removed"} & {*events}
    server.join(10.0)
    assert not server.is_alive()
    assert f"lane {lane}, from learner rank {lane} to scheduler rank 0: the cable is cut" in caplog.text


@pytest.mark.slow
def test_a_lane_that_breaks_for_good_ends_its_learner_and_costs_no_engine_its_place():
    made, events = [], []

    def tear(bucket):
        if learner.publisher.version == 2:
            raise TransportError("its card is broken", "closed")

    def factory(config, host):
        made.append(faulty(0, tear if len(made) == 1 else lambda _: None, before=True)(config, host))
        return made[-1]

    with Learner(2, 1, factory=factory) as learner:
        servers = [Rollout(learner.publisher, f"rollout-{n}", config=BUS) for n in range(2)]
        until(lambda: len(learner.publisher.members()) == 2, "both join")
        learner.publisher.on_event.append(lambda event: events.append(event.kind))
        assert len(learner.publish(1).served) == 2
        learner.start(2)
        with pytest.raises(WeightBusError, match=r"v2 reaches none of 2 engines, .* its card is broken \[closed\]"):
            until(lambda: learner.publisher.wait() and False, "its end", 60.0)
        assert events.count("failed") == 2 * BUS.max_heals + 1 and "removed" not in events
    for server in servers:
        server.join(10.0)
        assert isinstance(server.ended, BusClosed) and server.engine.activated == [1]


POINTS = [
    *("slow@1:meeting", "kill@1:joining", "cut@1:joining", "stop@2:before-0", "kill@2:before-2"),
    *("cut@2:before-2", "slow@2:before-2", "corrupt@2:before-2", "kill@2:closing", "cut@2:closing"),
]
ENDS = ("kill", "stop")


@pytest.mark.slow
@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("fault", POINTS)
def test_a_lane_that_breaks_anywhere_costs_at_most_the_member_at_fault(tmp_path, caplog, side, fault):
    """No hang, no version that is not proven, and no healthy engine that loses its place."""
    action, update = fault.split("@")[0], int(fault.split("@")[1][0])
    events: list[Any] = []
    with ExitStack() as stack:
        given: dict[str, Any] = {"processes": True, "faults": [fault]} if side == "sender" else {}
        patience_s = 3 * BUS.deadline_s if action == "cut" else BUS.deadline_s  # more than CUT_S, and a busy machine
        config = BUS.model_copy(update={"deadline_s": patience_s})
        learner = stack.enter_context(Learner(2, 2, config=config, **given))
        publisher = learner.publisher
        publisher.on_event.append(events.append)
        faults = [fault.replace("before", "after") if action == "corrupt" else fault]
        makes = {"well": Schedulers(tmp_path, 2)}
        makes["other"] = Schedulers(tmp_path, 2) if side == "sender" else SchedulerProcesses(2, faults=faults)
        servers = {name: stack.enter_context(made).join(publisher, name) for name, made in makes.items()}
        until(lambda: len(publisher.members()) == 2, "both join", 60.0)
        places = {name: server.subscriber.subscription.session for name, server in servers.items()}
        healthy = {"well", "other"} if side == "sender" else {"well"}
        if update == 2:
            assert sorted(learner.publish(1).served) == ["other", "well"]
        started = time.monotonic()
        learner.start(update)
        if side == "sender" and action in ENDS:
            with pytest.raises(WeightBusError, match=r"learner rank 1 .*(closed|silent)"):
                until(lambda: publisher.wait() and False, "its end", 120.0)
            heal = healthy
        else:
            report = publisher.wait()
            assert time.monotonic() - started < patience_s + 1, "no step waits longer"
            if side == "receiver" and action in ENDS:
                assert "other" in report.failed
            heal = healthy if action in ENDS else {"well", "other"}
            until(lambda: heal <= {*publisher.wait().served}, "it is sent again", 40.0)
            until(lambda: heal <= {*learner.publish(publisher.version + 1).served}, "and the next one", 40.0)
        for name in heal & healthy:
            engine = servers[name].engine
            for held, slices in zip(engine.ranks, wanted(2), strict=bool(engine.activated)):
                proven = moe(engine.activated[-1])
                assert all(torch.equal(held[s.name], cut(proven[s.name], s.start, s.shape)) for s in slices)
        assert not any(server.engine.quarantined for server in servers.values()), "nothing unproven came so far"
        assert not healthy & {event.name for event in events if event.kind == "removed"}
        for name in healthy:
            assert servers[name].subscriber.subscription.session == places[name], "it keeps its place"
