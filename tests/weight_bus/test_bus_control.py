"""The control plane by itself: a copy of a message is no message."""

import itertools
from collections.abc import Iterator

from replay.channel import DuplicateMessage
from tests.support.bus_receiver import HOST, RUN
from weight_bus.control import Dealer, Router
from weight_bus.messages import Goodbye, Heartbeat


def poll(dealer: Dealer) -> Iterator[object]:
    while (message := dealer.poll(0.5)) is not None:
        yield message


def test_a_subscriber_takes_a_copy_of_a_message_for_what_it_is() -> None:
    """A Begin that came twice was waited for twice, and gloo ends a process whose broadcast is another's."""
    router = Router(HOST, 0, RUN)
    dealer = Dealer(router.address, "one", RUN)
    try:
        dealer.send(Goodbye(session="s", reason="so that the router knows it"))
        assert len(router.poll(5.0)) == 1
        router._sequence = itertools.chain([7, 8, 7, 7], itertools.count(9))
        for number in range(5):
            assert router.send("one", Heartbeat(session=f"{number}")) == ""
        received = list(poll(dealer))
        assert [type(message) for message in received] == [
            Heartbeat,
            Heartbeat,
            DuplicateMessage,
            DuplicateMessage,
            Heartbeat,
        ]
        assert "Heartbeat number 7 came before" in str(received[2]) and received[2].symptom == "duplicate"
    finally:
        dealer.close()
        router.close()
