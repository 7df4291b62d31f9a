"""Keys on real sockets: who comes in, who is refused with which words on both sides, and what the wire shows."""

import asyncio
import dataclasses
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from replay.channel import MAX_MESSAGE_BYTES, AsyncDealer, AsyncRouter, ChannelError, Dealer, Keys, KeysError, handshake
from replay.channel.frames import WireError
from replay.channel.sockets import bind, configure
from tests.security.served_replay import NOTES, RUN, Note, keys_of
from tests.support.waiting import PATIENT_S
from weight_bus import control

MARK = "a-prompt-that-nobody-else-may-read"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Keys]:
    """The learner's keys, a rollout node's, and other ones."""
    root = tmp_path_factory.mktemp("keys")
    return keys_of(root, "node1") | {"other": keys_of(root / "elsewhere")["learner"]}


async def echo(router: AsyncRouter) -> None:
    while True:
        if await router.wait(0.05) and (arrived := await router.receive()):
            identity, envelope = arrived
            assert not isinstance(envelope, WireError)
            await router.send(identity, envelope.message)


@asynccontextmanager
async def echoing(
    keys: Keys | None, port: int = 0, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[AsyncRouter]:
    """A router that says everything again."""
    router = AsyncRouter("127.0.0.1", port, RUN, NOTES, keys=keys, max_message_bytes=max_message_bytes)
    answering = asyncio.create_task(echo(router))
    try:
        yield router
        assert not answering.done()
    finally:
        answering.cancel()
        router.close()


def ask(address: str, keys: Keys | None, timeout_s: float = PATIENT_S) -> str | None:
    with Dealer(address, "asker", NOTES, keys=keys) as dealer:
        dealer.send(Note(text=MARK))
        envelope = dealer.poll(timeout_s)
        assert envelope is None or isinstance(envelope.message, Note)
        return envelope.message.text if envelope is not None else None


def refusals(keys: dict[str, Keys]) -> dict[str, tuple[Keys | None, Keys | None, str, str]]:
    """(server's keys, client's keys, what the client says, what the server counts) by case."""
    wrong_server = dataclasses.replace(keys["node1"], server_public=keys["other"].server_public)
    stranger = dataclasses.replace(keys["other"], server_public=keys["learner"].server_public)
    return {
        "unlisted": (keys["learner"], stranger, r"refused the key of this node, 'learner' of .*other", "not in"),
        "no keys": (keys["learner"], None, "wants CURVE keys and this node has none; set network.keys", "has no keys"),
        "keys for nobody": (None, keys["node1"], "the keys of .*node1; set network.keys there|it has no keys: set", ""),
        "wrong server": (keys["learner"], wrong_server, r"its key is not .*node1/server\.key", "of another server"),
    }


@pytest.mark.parametrize("case", ["unlisted", "no keys", "keys for nobody", "wrong server"])
@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_refused_peers_are_named_on_both_sides(
    keys: dict[str, Keys], case: str, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_S", 0.3)
    serving, own, says, counted = refusals(keys)[case]

    async def asks(router: AsyncRouter) -> None:
        with pytest.raises(ChannelError, match=says) as caught:
            await asyncio.to_thread(ask, router.address, own)
        assert router.address in str(caught.value) and caught.value.symptom == "closed"
        if serving is not None:
            assert await asyncio.to_thread(ask, router.address, keys["node1"]) == MARK, "it disturbs no other"

    async def asks_too(router: AsyncRouter) -> None:
        dealer = AsyncDealer(router.address, "async", NOTES, keys=own)
        try:
            with pytest.raises(ChannelError, match=says):
                await dealer.receive(PATIENT_S)
            with pytest.raises(ChannelError, match=says):  # ZeroMQ may have given up, and a send must not wait for it
                for _ in range(10_000):
                    await dealer.send(Note(text="x"))
        finally:
            dealer.close()

    async def refused_by_a_router() -> dict[str, int]:
        async with asyncio.timeout(200.0), echoing(serving) as router:
            await (asks if kind == "blocking" else asks_too)(router)
            return router._gate.refused if router._gate else {}  # it counts until it ends: a close may end a handshake

    with caplog.at_level(logging.WARNING, logger="replay.channel.gate"):
        refused = asyncio.run(refused_by_a_router())
    if counted:
        lines = [record.getMessage() for record in caplog.records]
        assert any(counted in reason for reason in refused), refused
        assert len(lines) == len(refused), "one line for each reason, however often it tries"
        assert all("1 times so far" in line for line in lines)
    else:
        assert refused == {}


def test_a_context_without_a_gate_admits_nobody(keys: dict[str, Keys], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_S", 0.3)
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    configure(server, keys["learner"])
    try:
        with pytest.raises(ChannelError, match=r"closed .* handshakes"):
            ask(bind(server, "127.0.0.1", 0), keys["node1"])
        assert not server.poll(0)
    finally:
        server.close()
        context.term()


def test_a_monitor_that_nobody_reads_blocks_nothing() -> None:
    """ZeroMQ's own bound of 2000 events would stop the thread that sends and receives."""
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    configure(server)
    server.setsockopt(zmq.BACKLOG, 1000)
    monitor = handshake.Monitor(context, server, zmq.EVENT_ALL)
    try:
        address = bind(server, "127.0.0.1", 0)
        for _ in range(800):
            socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))).close()
        with Dealer(address, "late", NOTES) as dealer:
            dealer.send(Note(text=MARK))
            assert server.poll(int(PATIENT_S * 1000))
    finally:
        monitor.close()
        server.close()
        context.term()


@pytest.mark.parametrize("name", ["node1", None])
def test_the_wire_shows_nothing(keys: dict[str, Keys], name: str | None) -> None:
    """The case without keys proves that the tap would see it."""
    seen = bytearray()

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            seen.extend(data)
            target.write(data)

    async def asks_through_a_tap() -> None:
        async with asyncio.timeout(200.0), echoing(keys["learner"] if name else None) as router:
            host, port = router.address.removeprefix("tcp://").split(":")

            async def forward(client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
                replies, upstream = await asyncio.open_connection(host, int(port))
                await asyncio.gather(carry(client, upstream), carry(replies, back))

            tap = await asyncio.start_server(forward, host, 0)
            address = "tcp://{}:{}".format(*tap.sockets[0].getsockname())
            assert await asyncio.to_thread(ask, address, keys[name] if name else None) == MARK

    asyncio.run(asks_through_a_tap())
    assert len(seen) > 100
    assert (MARK.encode() in seen) == (name is None)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.1.2.3", "eth0"])
def test_sockets_that_leave_the_machine_need_keys(host: str) -> None:
    for server in (AsyncRouter, control.Router):
        with pytest.raises(KeysError, match=r"leaves the loopback interface.*replay\.keys.*network\.insecure"):
            server(host, 0, RUN, NOTES) if server is AsyncRouter else server(host, 0, RUN)


def test_keys_or_consent_open_other_interfaces(keys: dict[str, Keys]) -> None:
    for access in ({"keys": keys["learner"]}, {"insecure": True}):
        AsyncRouter("0.0.0.0", 0, RUN, NOTES, **access).close()
        control.Router("0.0.0.0", 0, RUN, **access).close()
