"""The control plane: a copy of a message is no message, and versions arrive under keys (refusals: test_curve.py)."""

import itertools

from replay import keys as make_keys
from replay.channel import DuplicateMessage, load_keys
from tests.support.bus_receiver import HOST, RUN, Rollout, digests, learner, publish, until, weights
from weight_bus import BusClosed
from weight_bus.control import Dealer, Router
from weight_bus.messages import Goodbye, Heartbeat


def test_a_subscriber_takes_a_copy_of_a_message_for_what_it_is():
    """A Begin that came twice was waited for twice, and gloo ends a process whose broadcast is another's."""
    router = Router(HOST, 0, RUN)
    dealer = Dealer(router.address, "one", RUN)
    try:
        dealer.send(Goodbye(session="s", reason="so that the router knows it"))
        assert len(router.poll(20.0)) == 1
        router._sequence = itertools.chain([7, 8, 7, 7], itertools.count(9))
        for number in range(5):
            assert router.send("one", Heartbeat(session=f"{number}")) == ""
        received = [dealer.poll(20.0) for _ in range(5)]
        kinds = [Heartbeat, Heartbeat, DuplicateMessage, DuplicateMessage, Heartbeat]
        assert [type(message) for message in received] == kinds
        assert "Heartbeat number 7 came before" in str(received[2]) and received[2].symptom == "duplicate"
    finally:
        dealer.close()
        router.close()


def test_versions_arrive_under_keys(tmp_path):
    make_keys.make(tmp_path / "learner", ["node1"], force=False)
    make_keys.export(tmp_path / "learner", "node1", tmp_path / "node1")
    with learner(keys=load_keys(tmp_path / "learner")) as publisher:
        server = Rollout(publisher, "r0", keys=load_keys(tmp_path / "node1"))
        for version in (0, 1):
            assert publish(publisher, version).failed == {}
            until(lambda version=version: version in server.engine.activated, f"v{version}")
            assert digests(server.engine.live) == digests(weights(version))
    server.join(20.0)
    assert isinstance(server.ended, BusClosed) and "said goodbye" in str(server.ended)
