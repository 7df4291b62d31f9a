"""The control plane: a copy of a message is no message, and versions arrive under keys (refusals: test_curve.py)."""

import itertools

from configs.infrastructure import WeightBus
from replay.channel import Dealer, DuplicateMessage, Envelope
from tests.security.served_replay import keys_of
from tests.support.bus_receiver import HOST, RUN, Rollout, digests, learner, publish, until, weights
from weight_bus import BusClosed, Subscriber
from weight_bus.control import Router
from weight_bus.messages import TO_SUBSCRIBER, Goodbye, Heartbeat, Join, Removed


def test_a_subscriber_takes_a_copy_of_a_message_for_what_it_is():
    """A Begin that came twice was waited for twice, and gloo ends a process whose broadcast is another's."""
    router = Router(HOST, 0, RUN)
    subscriber = Subscriber(router.address, name="one", config=WeightBus(), host=HOST, run_id=RUN)
    try:
        subscriber._send(Goodbye(session="s", reason="so that the router knows it"))
        ((identity, _),) = router.poll(20.0)
        router._sequence = itertools.chain([7, 8, 7, 7], itertools.count(9))
        for number in range(5):
            assert router.send(identity, Heartbeat(session=f"{number}")) == ""
        received = []
        until(lambda: received.append(subscriber._next_message()) or len(list(filter(None, received))) == 5, "all")
        received = list(filter(None, received))
        kinds = [Envelope, Envelope, DuplicateMessage, DuplicateMessage, Envelope]
        assert [type(message) for message in received] == kinds
        assert received[2].symptom == "duplicate"
    finally:
        subscriber.close()
        router.close()


def test_versions_arrive_under_keys(tmp_path):
    """And another node's key, whatever it says, takes the place of no member and speaks for none."""
    keys = keys_of(tmp_path, "node1", "node2")
    with learner(keys=keys["learner"]) as publisher:
        server = Rollout(publisher, "r0", keys=keys["node1"])
        assert publish(publisher, 0).failed == {}
        until(lambda: 0 in server.engine.activated, "v0")
        session, facts = server.subscriber.subscription.session, server.subscriber._intake.facts
        thief = Dealer(publisher.address, "r0.thief", TO_SUBSCRIBER, keys=keys["node2"])
        thief.run_id = RUN
        thief.send(Join(session="thief-1", name="r0", instance="thief", pid=1, host="node2", facts=facts))
        thief.send(Goodbye(session=session, reason="of another"))
        thief.send(Heartbeat(session=session))
        answers = [thief.poll(20.0).message for _ in range(2)]
        assert [answer.rejoin for answer in answers if isinstance(answer, Removed)] == [False, True]
        assert "belongs to key 'node1', not to 'node2'" in answers[0].reason
        thief.close()
        assert publish(publisher, 1).failed == {}
        until(lambda: 1 in server.engine.activated, "v1")
        assert digests(server.engine.live) == digests(weights(1))
        assert server.subscriber.subscription.session == session
    server.join(20.0)
    assert isinstance(server.ended, BusClosed) and "said goodbye" in str(server.ended)
