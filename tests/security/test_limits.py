"""What peers can cost: connections that prove nothing, peers that do not read, peers that only send."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator

import pytest
import zmq
from served_replay import (
    PATIENT_S,
    RUN,
    arrivals,
    greeting,
    plain_connection,
    raw_dealer,
    read_until_closed,
    resident_bytes,
    served,
    with_router,
)

from replay import keys as make_keys
from replay import messages as m
from replay.channel import AsyncRouter, Dealer, Keys, load_keys, sockets
from replay.channel.frames import encode

CONNECTIONS = 500
MARK, SIZE = 64, 64 * 1024
"""Messages of a short queue, and bytes of each."""
HELD_BYTES = 64 * 1024
"""At most this much for a connection that has not proven its key."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys.make(folder, ["node1"], force=False)
    return load_keys(folder)


@pytest.mark.parametrize("says", [b"", greeting(b"CURVE") + b"\x04\xc8\x05HELLO"], ids=["silent", "half a handshake"])
def test_unproven_connections_cost_little_and_end(keys: Keys, says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sockets.OPTIONS[zmq.HANDSHAKE_IVL] == 5000
    monkeypatch.setitem(sockets.OPTIONS, zmq.HANDSHAKE_IVL, 1000)
    with served(keys) as replay:
        files, before = len(os.listdir("/proc/self/fd")), resident_bytes()
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(plain_connection(replay.port)) for _ in range(CONNECTIONS)]
            for connection in connections:
                connection.sendall(says)
            with Dealer(replay.address, "honest", m.FROM_REPLAY, keys=keys) as dealer:
                dealer.send(m.StatusRequest())
                assert dealer.poll(PATIENT_S) is not None, "a peer with a key is served meanwhile"
            held = resident_bytes() - before
            started = time.monotonic()
            for connection in connections:
                read_until_closed(connection)
            assert time.monotonic() - started < 3.0
        assert held < CONNECTIONS * HELD_BYTES
        deadline = time.monotonic() + PATIENT_S
        while len(os.listdir("/proc/self/fd")) > files + 10:
            assert time.monotonic() < deadline, "connections are left"
            time.sleep(0.05)


@pytest.fixture
def short_queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of MARK messages; what waits in them must not take more memory than four of them."""
    monkeypatch.setitem(sockets.OPTIONS, zmq.SNDHWM, MARK)
    monkeypatch.setitem(sockets.OPTIONS, zmq.RCVHWM, MARK)
    before = resident_bytes()
    yield
    # both ends are in this process; the rest is what the kernel buffers, which is no memory of ours
    assert resident_bytes() - before < 4 * MARK * SIZE


@pytest.mark.usefixtures("short_queues")
def test_a_peer_that_does_not_read_is_given_up_at_a_bounded_cost() -> None:
    async def body(router: AsyncRouter) -> int:
        slow_reader = raw_dealer(router.address, "slow", high_water_mark=1)
        with slow_reader as slow, raw_dealer(router.address, "quick") as quick:
            for peer in (slow, quick):
                peer.send_multipart(encode(m.StatusRequest(), RUN, 1))
            await arrivals(router, 2)
            queued, full_since = 0, 0.0
            deadline = time.monotonic() + PATIENT_S
            while time.monotonic() < deadline and not (full_since and time.monotonic() - full_since > 0.5):
                if await router.send("slow", m.Refused(reason="x" * SIZE)):
                    queued, full_since = queued + 1, 0.0
                else:
                    full_since = full_since or time.monotonic()
                    await asyncio.sleep(0.02)
            assert full_since, "its queue never became full"
            assert await router.send("quick", m.Heartbeat())
            assert await asyncio.to_thread(quick.poll, 1000 * PATIENT_S)
            return queued

    assert MARK <= with_router(body, kinds=m.TO_REPLAY) < 10 * MARK


@pytest.mark.usefixtures("short_queues")
def test_a_server_that_does_not_read_stops_its_senders() -> None:
    async def body(router: AsyncRouter) -> int:
        with raw_dealer(router.address, "flood", high_water_mark=1) as flood:
            frames = encode(m.Heartbeat(activity="x" * SIZE), RUN, 1)
            sent, last = 0, time.monotonic()
            while time.monotonic() - last < 0.5:
                try:
                    flood.send_multipart(frames, flags=zmq.NOBLOCK)
                    sent, last = sent + 1, time.monotonic()
                except zmq.Again:
                    await asyncio.sleep(0.01)
                assert sent < 10_000, "nothing holds it up"
            return sent

    assert with_router(body, kinds=m.TO_REPLAY) >= MARK
