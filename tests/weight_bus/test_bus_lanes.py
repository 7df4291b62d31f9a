"""Lanes: several senders, several scheduler ranks an engine; what a plan must hold, and what faults of a lane do."""

import pytest
import torch

from tests.support.bus_lanes import Learner, Rollout, Schedulers, cut, engine, lanes_of, moe, wanted
from tests.support.bus_receiver import digests, until

SIDES = [(1, 1), (2, 1), (1, 2), (3, 2), (2, 3), (4, 2), (2, 2)]


@pytest.mark.parametrize(("senders", "positions"), SIDES)
def test_each_position_gets_all_it_needs_once_in_even_parts(senders, positions):
    lanes = lanes_of(senders, positions)
    assert len(lanes) == max(senders, positions) and {lane.sender for lane in lanes} == set(range(senders))
    for position, slices in enumerate(wanted(moe(0), positions)):
        its = [lane for lane in lanes if lane.position == position]
        got = [(e.name, e.start, e.shape) for lane in its for e in lane.layout.entries]
        assert sorted(got) == sorted((s.name, s.start, s.shape) for s in slices)
        sizes = [sum(entry.num_bytes for entry in lane.layout.entries) for lane in its]
        assert max(sizes) - min(sizes) <= max(s.num_bytes for s in slices)


@pytest.mark.parametrize(("senders", "positions"), SIDES)
def test_versions_arrive_in_slices_of_each_scheduler_rank(tmp_path, senders, positions):
    with Learner(senders, positions) as learner:
        schedulers = [Schedulers(tmp_path, positions) for _ in range(2)]
        servers = [engine(learner.publisher, f"rollout-{n}", s) for n, s in enumerate(schedulers)]
        until(lambda: len(learner.publisher.members()) == 2, "both join")
        for version in range(1, 4):
            report = learner.publish(version)
            assert sorted(report.served) == ["rollout-0", "rollout-1"], report
        assert report.epoch == 1
        for server in servers:
            assert server.engine.activated == [1, 2, 3]
            for position, slices in enumerate(wanted(moe(0), positions)):
                held = server.engine.ranks[position]
                assert held.keys() == {s.name for s in slices}
                assert all(torch.equal(held[s.name], cut(moe(3)[s.name], s.start, s.shape)) for s in slices)
        for one in schedulers:
            one.close()


def test_a_plain_subscriber_gets_whole_tensors_of_three_senders():
    with Learner(3, 1) as learner:
        server = Rollout(learner.publisher, "rollout-0")
        until(lambda: learner.publisher.members(), "it joins")
        assert learner.publish(1).served == ["rollout-0"]
        assert digests(server.engine.live) == digests(moe(1))


def test_a_newcomer_is_filled_in_lanes_beside_those_of_the_others():
    with Learner(3, 1) as learner:
        servers = [Rollout(learner.publisher, f"rollout-{n}") for n in range(2)]
        until(lambda: len(learner.publisher.members()) == 2, "both join")
        learner.publish(1)
        servers.append(Rollout(learner.publisher, "late"))
        until(lambda: servers[-1].engine.activated == [1], "it is filled")
        for version in (2, 3):
            assert len(learner.publish(version).served) == 3
        assert [server.subscriber.subscription.epoch for server in servers] == [1, 1, 2]
        assert all(digests(server.engine.live) == digests(moe(3)) for server in servers)
