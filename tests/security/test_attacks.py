"""Attacks on a real replay, what each side hears, and what peers can cost. A router alone: test_admission.py."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any

import pytest
import zmq

from replay import messages as m
from replay.channel import AsyncRouter, Dealer, Keys, Message, decode, encode, handshake, roster, sockets
from tests.security.raw_peers import greeting, plain_connection, raw_dealer, read_until_closed, ready
from tests.security.served_replay import RUN, Replay, arrivals, keys_of, resident_bytes, served, with_router
from tests.support.waiting import PATIENT_S, until

TEN_GB = 10 * 1000**3
CONNECTIONS = 500
MARK, SIZE = 64, 64 * 1024
"""Messages of a short queue, and bytes of each."""
HELD_BYTES = 64 * 1024
"""At most this much for a connection that has not proven its key."""


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Keys]:
    return keys_of(tmp_path, "node1")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_S", 0.5)
    monkeypatch.setattr(roster, "LOOK_S", 0.0)


def hello(role: str, name: str, rank: int = 0) -> m.Hello:
    return m.Hello(role=role, name=name, pid=1, host="h", rank=rank)  # type: ignore[arg-type]


def answer(dealer: Dealer, kind: type[Message] | UnionType) -> Message:
    """The first message of a kind that replay sends."""
    deadline = time.monotonic() + PATIENT_S
    while time.monotonic() < deadline:
        envelope = dealer.poll(0.2)
        if envelope is not None and isinstance(envelope.message, kind):
            return envelope.message
    raise AssertionError(f"no {kind} came")


@pytest.mark.parametrize("where", ["in the handshake", "after it"])
def test_ten_gigabytes_announced(keys: dict[str, Keys], where: str) -> None:
    """A length within the limit is waited for, which shows that it is the length that ends the connection."""
    own = keys["learner"] if where == "in the handshake" else None
    before_it = greeting(b"CURVE") + b"\x06" if own is not None else greeting(b"NULL") + ready(b"big") + b"\x02"
    with served(own) as replay:
        with plain_connection(replay.port) as connection:
            connection.sendall(before_it + (1_000_000).to_bytes(8, "big"))
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                read_until_closed(connection)
        before = resident_bytes()
        with plain_connection(replay.port) as connection:
            connection.sendall(before_it + TEN_GB.to_bytes(8, "big"))
            read_until_closed(connection)
        assert resident_bytes() - before < 8_000_000


def test_a_replayed_message(keys: dict[str, Keys]) -> None:
    recorded = encode(m.Published(version=7, digest="d"), RUN, 1_000)
    with served(keys["learner"]) as replay, raw_dealer(replay.address, "learner-0.1f", keys["learner"]) as dealer:
        for _ in range(2):
            dealer.send_multipart(recorded)
        line = replay.line("came before")
        answers = [decode(dealer.recv_multipart(), m.FROM_REPLAY).message for _ in range(2)]
    (last,) = [message for message in answers if isinstance(message, m.Refused) and message.code == "message"]
    assert "message 1000 came before" in line and line.endswith("[duplicate]") and "came before" in last.reason


def placed(rollout: str, learner: str) -> dict[str, Any]:
    return {"placement": {"device": "cpu", "rollout": rollout, "learner": learner}}


def says_hello(replay: Replay, identity: str, keys: Keys, rank: int) -> str:
    """The reason for which replay refuses a learner's Hello; "" for Welcome."""
    with Dealer(replay.address, identity, m.FROM_REPLAY, keys=keys) as dealer:
        dealer.send(hello("learner", f"learner-{rank}", rank))
        message = answer(dealer, m.Welcome | m.Refused)
        return message.reason if isinstance(message, m.Refused) else ""


def test_a_rollout_key_that_says_it_is_a_rank_of_another_learner_node(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "node1", "node2", "nodes")
    with served(keys["learner"], **placed("node2:0", "node0:0; node1:0")) as replay:
        assert says_hello(replay, "learner-0.0a", keys["learner"], 0) == ""
        assert says_hello(replay, "learner-1.1a", keys["node1"], 1) == ""
        reason = says_hello(replay, "learner-1.2a", keys["node2"], 1)
        assert "'node2'" in reason and "['node1']" in reason and "--add NODE" in reason
        replay.line("may not be a learner")
        assert "'nodes'" in says_hello(replay, "learner-1.3a", keys["nodes"], 1), "shared with a node for rollouts"
        assert "'node1'" in says_hello(replay, "learner-0.4a", keys["node1"], 0)


@pytest.mark.parametrize("says", [b"", greeting(b"CURVE") + b"\x04\xc8\x05HELLO"], ids=["silent", "half a handshake"])
def test_unproven_connections_cost_little_and_end(
    keys: dict[str, Keys], says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sockets.OPTIONS[zmq.HANDSHAKE_IVL] == 5000
    monkeypatch.setitem(sockets.OPTIONS, zmq.HANDSHAKE_IVL, 1000)
    with served(keys["learner"]) as replay:
        files, before = len(os.listdir("/proc/self/fd")), resident_bytes()
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(plain_connection(replay.port)) for _ in range(CONNECTIONS)]
            for connection in connections:
                connection.sendall(says)
            with Dealer(replay.address, "honest", m.FROM_REPLAY, keys=keys["learner"]) as dealer:
                dealer.send(m.StatusRequest())
                assert dealer.poll(PATIENT_S) is not None, "a peer with a key is served meanwhile"
            held = resident_bytes() - before
            for connection in connections:
                read_until_closed(connection)
        assert held < CONNECTIONS * HELD_BYTES
        until(lambda: len(os.listdir("/proc/self/fd")) <= files + 10, "no connection is left")


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
