"""The proxy between real ZeroMQ sockets: what passes unharmed, and what each fault does to messages."""

import time

import pytest
import zmq

from replay.channel import Dealer, WireError, decode, encode
from replay.messages import FROM_REPLAY, TO_REPLAY, Cancel, Heartbeat, Renew
from scripts.chaos.proxy import Intercept, Proxy
from tests.support.waiting import until


@pytest.fixture
def ends():
    with Proxy() as proxy, zmq.Context() as context:
        router = context.socket(zmq.ROUTER)
        router.linger, router.router_mandatory = 0, True
        port = router.bind_to_random_port("tcp://127.0.0.1")
        link = proxy.link(f"tcp://127.0.0.1:{port}")
        with Dealer(link.address, "me", FROM_REPLAY) as dealer:
            say(dealer, "before")
            assert arrived(router).activity == "before"
            yield router, dealer, proxy, link
        router.close()


def arrived(router):
    assert router.poll(5000), "nothing came"
    _, *frames = router.recv_multipart()
    return decode(frames, TO_REPLAY).message


def unreachable(router, identity):
    """Whether the router has seen that this connection has ended; else what it sends is lost."""
    try:
        router.send_multipart([identity, *encode(Heartbeat(activity="lost"), "r", 1)])
    except zmq.ZMQError:
        return True
    return False


def say(dealer, *activities):
    for activity in activities:
        dealer.send(Heartbeat(activity=activity))


def intercept_on(link, **fields):
    link.intercepts["up"].append(Intercept(wanted=lambda message: True, **fields))
    return link.intercepts["up"][0]


@pytest.mark.parametrize("of", [lambda message: 0, lambda message: message.largest_array], ids=["header", "array"])
def test_a_flipped_bit_is_found_by_the_checksum(ends, of):
    router, dealer, _, link = ends
    intercept = intercept_on(link, change=lambda message: [message.flipped(of(message), 0.5).wire()])
    dealer.send(Renew(leases=[[0, 1, 1, 5]], token_ids=[1, 2, 3]))
    with pytest.raises(WireError):
        arrived(router)
    assert intercept.done.is_set() and intercept.kind == "Renew"
    say(dealer, "next")
    assert arrived(router).activity == "next", "the connection lives and the next message is whole"


@pytest.mark.parametrize(
    ("times", "late", "expected"),
    [(2, False, ["1", "1", "2", "3"]), (1, True, ["2", "1", "3"]), (0, False, ["2", "3"])],
    ids=["twice", "after the next", "never"],
)
def test_a_message_is_given(ends, times, late, expected):
    router, dealer, _, link = ends
    intercept = intercept_on(link, change=lambda message: [message.wire()] * times, hold_for_next=late)
    say(dealer, "1", "2", "3")
    assert [arrived(router).activity for _ in expected] == expected and intercept.done.is_set()


def test_a_cut_link_comes_back_when_it_may(ends):
    router, dealer, proxy, link = ends
    proxy.cut(link, closed_for_s=3600.0)
    until(lambda: unreachable(router, dealer.route), "replay's end is closed")
    say(dealer, "after")
    assert not router.poll(300)
    link.closed_until = 0.0
    assert arrived(router).activity == "after"
    started = time.monotonic()
    proxy.cut(link, closed_for_s=0.4)
    until(lambda: [say(dealer, "again"), router.poll(50)][1], "it opens by itself")
    assert time.monotonic() - started > 0.4


def test_a_frozen_direction_keeps_its_connection_and_loses_nothing(ends):
    router, dealer, _, link = ends
    link.frozen.add("up")
    say(dealer, "later")
    assert not router.poll(300)
    router.send_multipart([dealer.route, *encode(Heartbeat(activity="down"), "r", 1)])
    assert dealer.poll(5.0).message.activity == "down", "the other direction is open"
    link.frozen.clear()
    assert arrived(router).activity == "later"


def test_a_direction_freezes_before_a_kind_of_message(ends):
    router, dealer, _, link = ends
    link.holding["up"] = "Cancel"
    say(dealer, "passes")
    dealer.send(Cancel(pass_=0, index=1, attempt=1, reason="r"))
    assert arrived(router).activity == "passes"
    assert link.held["up"].wait(5) and not router.poll(200)
    link.frozen.clear()
    assert isinstance(arrived(router), Cancel)


def test_an_orphaned_connection_stays_open_at_replay(ends):
    router, _, _, link = ends
    with router.context.socket(zmq.DEALER) as other:
        other.identity = b"other"
        other.connect(link.address)
        other.send(b"before")
        assert router.poll(5000) and router.recv_multipart()[0] == b"other"
        link.orphans = True
    time.sleep(0.3)
    router.send_multipart([b"other", b"into the void"])
    link.orphans = False
    until(lambda: unreachable(router, b"other"), "its connection ends")
