"""What peers can cost: connections that prove nothing, peers that do not read, peers that only send."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator

import pytest
import zmq
from served_replay import PATIENT_S, greeting, plain_connection, raw_dealer, read_until_closed, resident_bytes, served

from replay import keys as make_keys
from replay import messages as m
from replay.channel import AsyncRouter, Dealer, Keys, Limits, configure, load_keys, sockets
from replay.channel.frames import encode

CONNECTIONS = 800
HELD_BYTES = 64 * 1024
"""At most this much for a connection that has not proven its key."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys.make(folder, ["node1"], force=False)
    return load_keys(folder)


@contextlib.contextmanager
def many(port: int, says: bytes) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(plain_connection(port)) for _ in range(CONNECTIONS)]
        for connection in made:
            connection.sendall(says)
        yield made


@pytest.mark.parametrize("says", [b"", greeting(b"CURVE") + b"\x04\xc8\x05HELLO"], ids=["silent", "half a handshake"])
def test_unproven_connections_cost_little_and_end(keys: Keys, says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sockets.OPTIONS, zmq.HANDSHAKE_IVL, 1500)
    with served(keys) as replay:
        files, before = len(os.listdir("/proc/self/fd")), resident_bytes()
        with many(replay.port, says) as connections:
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


def test_every_socket_gives_a_handshake_five_seconds() -> None:
    with zmq.Context() as context:
        for kind in (zmq.ROUTER, zmq.DEALER):
            with context.socket(kind) as made:
                configure(made, Limits())
                assert made.getsockopt(zmq.HANDSHAKE_IVL) == 5000


def test_a_peer_that_does_not_read_is_given_up_at_a_bounded_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    mark, size = 64, 64 * 1024
    monkeypatch.setitem(sockets.OPTIONS, zmq.SNDHWM, mark)
    monkeypatch.setitem(sockets.OPTIONS, zmq.RCVHWM, mark)

    async def run() -> int:
        router = AsyncRouter("127.0.0.1", 0, "r1", m.TO_REPLAY)
        try:
            slow_reader = raw_dealer(router.address, "slow", high_water_mark=1)
            with slow_reader as slow, raw_dealer(router.address, "quick") as quick:
                for peer in (slow, quick):
                    peer.send_multipart(encode(m.StatusRequest(), "r1", 1))
                for _ in range(2):
                    assert await router.wait(PATIENT_S) and await router.receive()
                queued, full_since = 0, 0.0
                deadline = time.monotonic() + PATIENT_S
                while time.monotonic() < deadline and not (full_since and time.monotonic() - full_since > 0.5):
                    if await router.send("slow", m.Refused(reason="x" * size)):
                        queued, full_since = queued + 1, 0.0
                    else:
                        full_since = full_since or time.monotonic()
                        await asyncio.sleep(0.02)
                assert full_since, "its queue never became full"
                assert await router.send("quick", m.Heartbeat())
                assert await asyncio.to_thread(quick.poll, 1000 * PATIENT_S)
                return queued
        finally:
            router.close()

    before = resident_bytes()
    queued = asyncio.run(asyncio.wait_for(run(), 30.0))
    # both ends are in this process; the rest is what the kernel buffers, which is no memory of ours
    assert resident_bytes() - before < 4 * mark * size
    assert mark <= queued < 10 * mark


def test_a_server_that_does_not_read_stops_its_senders(monkeypatch: pytest.MonkeyPatch) -> None:
    mark, size = 64, 64 * 1024
    monkeypatch.setitem(sockets.OPTIONS, zmq.SNDHWM, mark)
    monkeypatch.setitem(sockets.OPTIONS, zmq.RCVHWM, mark)

    async def run() -> int:
        router = AsyncRouter("127.0.0.1", 0, "r1", m.TO_REPLAY)
        try:
            with raw_dealer(router.address, "flood", high_water_mark=1) as flood:
                frames = encode(m.Heartbeat(activity="x" * size), "r1", 1)
                sent, last = 0, time.monotonic()
                while time.monotonic() - last < 0.5:
                    try:
                        flood.send_multipart(frames, flags=zmq.NOBLOCK)
                        sent, last = sent + 1, time.monotonic()
                    except zmq.Again:
                        await asyncio.sleep(0.01)
                    assert sent < 10_000, "nothing holds it up"
                return sent
        finally:
            router.close()

    before = resident_bytes()
    sent = asyncio.run(asyncio.wait_for(run(), 30.0))
    assert sent >= mark and resident_bytes() - before < 4 * mark * size
