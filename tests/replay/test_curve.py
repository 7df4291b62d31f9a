"""Keys on real sockets: who comes in, who is refused with which words on both sides, and what the wire shows."""

import asyncio
import dataclasses
import logging
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from replay import keys as make_keys
from replay.channel import (
    AsyncDealer,
    AsyncRouter,
    ChannelError,
    Dealer,
    Keys,
    KeysError,
    Limits,
    WireError,
    bind,
    configure,
    handshake,
    load_keys,
    registry,
)
from replay.channel.frames import Message
from weight_bus import control

RUN = "curve-test"
MARK = "a-prompt-that-nobody-else-may-read"
PATIENT_S = 10.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note(Message):
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blob(Message):
    data: NDArray[np.uint8]


KINDS = registry(Note, Blob)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The learner's folder, a rollout node's, and a folder of other keys."""
    root = tmp_path_factory.mktemp("keys")
    for name in ("learner", "other"):
        make_keys.make(root / name, ["node1"], force=False)
    make_keys.export(root / "learner", "node1", root / "node1")
    return {name: root / name for name in ("learner", "node1", "other")}


@pytest.fixture
def keys(folders: dict[str, Path]) -> dict[str, Keys]:
    return {name: load_keys(folder) for name, folder in folders.items()}


def stranger(keys: dict[str, Keys]) -> Keys:
    """Knows the server's public key, but its own is not listed."""
    return dataclasses.replace(keys["other"], server_public=keys["learner"].server_public)


async def echo(router: AsyncRouter) -> None:
    while True:
        if await router.wait(0.05) and (arrived := await router.receive()):
            identity, envelope = arrived
            assert not isinstance(envelope, WireError)
            await router.send(identity, envelope.message)


def with_router(
    body: Callable[[AsyncRouter], Coroutine[Any, Any, None]], keys: Keys | None, limits: Limits | None = None
) -> dict[str, int]:
    """Run `body` beside an echoing router; what its gate has refused."""

    async def both() -> dict[str, int]:
        router = AsyncRouter("127.0.0.1", 0, RUN, KINDS, limits, keys=keys)
        answering = asyncio.create_task(echo(router))
        try:
            await body(router)
            assert not answering.done()
            return dict(router._gate.refused) if router._gate else {}
        finally:
            answering.cancel()
            router.close()

    return asyncio.run(asyncio.wait_for(both(), 30.0))


def ask(address: str, keys: Keys | None, timeout_s: float = PATIENT_S) -> str | None:
    with Dealer(address, "asker", KINDS, keys=keys) as dealer:
        dealer.send(Note(text=MARK))
        envelope = dealer.poll(timeout_s)
        assert envelope is None or isinstance(envelope.message, Note)
        return envelope.message.text if envelope is not None else None


@pytest.mark.parametrize("name", ["learner", "node1"])
def test_listed_clients_come_in(keys: dict[str, Keys], name: str) -> None:
    async def body(router: AsyncRouter) -> None:
        assert await asyncio.to_thread(ask, router.address, keys[name]) == MARK
        dealer = AsyncDealer(router.address, "async", KINDS, keys=keys[name])
        try:
            await dealer.send(Blob(data=np.arange(100_000, dtype=np.uint8)))
            envelope = await dealer.receive(PATIENT_S)
            assert envelope is not None and isinstance(envelope.message, Blob)
            assert np.array_equal(envelope.message.data, np.arange(100_000, dtype=np.uint8))
        finally:
            dealer.close()

    assert with_router(body, keys["learner"]) == {}


def refusals(keys: dict[str, Keys]) -> dict[str, tuple[Keys | None, Keys | None, str, str]]:
    """(server's keys, client's keys, what the client says, what the server counts) by case."""
    wrong_server = dataclasses.replace(keys["node1"], server_public=keys["other"].server_public)
    return {
        "unlisted": (keys["learner"], stranger(keys), r"refused the key of this node, 'learner' of .*other", "not in"),
        "no keys": (keys["learner"], None, "wants CURVE keys and this node has none; set network.keys", "has no keys"),
        "keys for nobody": (None, keys["node1"], "speaks without CURVE and this node has the keys of .*node1", ""),
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
        dealer = AsyncDealer(router.address, "async", KINDS, keys=own)
        try:
            with pytest.raises(ChannelError, match=says):
                await dealer.receive(PATIENT_S)
            with pytest.raises(ChannelError, match=says):  # ZeroMQ may have given up, and a send must not wait for it
                for _ in range(10_000):
                    await dealer.send(Note(text="x"))
        finally:
            dealer.close()

    with caplog.at_level(logging.WARNING, logger="replay.channel.gate"):
        refused = with_router(asks if kind == "blocking" else asks_too, serving)
    if counted:
        lines = [record.getMessage() for record in caplog.records]
        assert any(counted in reason for reason in refused), refused
        assert len(lines) == len(refused), "one line for each reason, however often it tries"
        assert all("1 times so far" in line for line in lines)
    else:
        assert refused == {}


def test_a_server_that_comes_later_or_again_is_found(keys: dict[str, Keys]) -> None:
    """A closed port is not a refusal, and neither is a server that dies while peers are connected."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Dealer(f"tcp://127.0.0.1:{port}", "early", KINDS, keys=keys["node1"]) as dealer:
        assert dealer.poll(0.3) is None

        async def served() -> None:
            router = AsyncRouter("127.0.0.1", port, RUN, KINDS, keys=keys["learner"])
            answering = asyncio.create_task(echo(router))
            try:
                dealer.send(Note(text=MARK))
                assert (await asyncio.to_thread(dealer.poll, PATIENT_S)) is not None
            finally:
                answering.cancel()
                router.close()

        for _ in range(2):
            asyncio.run(asyncio.wait_for(served(), 30.0))


def test_a_context_without_a_gate_admits_nobody(keys: dict[str, Keys], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_S", 0.3)
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    configure(server, Limits(), keys["learner"])
    try:
        with pytest.raises(ChannelError, match=r"closed .* handshakes"):
            ask(bind(server, "127.0.0.1", 0), keys["node1"])
        assert not server.poll(0)
    finally:
        server.close()
        context.term()


def test_the_limit_of_messages_is_the_same_with_keys(keys: dict[str, Keys]) -> None:
    own = keys["learner"]

    async def body(router: AsyncRouter) -> None:
        for size, arrives in ((19_800, True), (20_100, False)):
            dealer = AsyncDealer(router.address, f"of-{size}", KINDS, keys=own)
            try:
                await dealer.send(Blob(data=np.zeros(size, dtype=np.uint8)))
                assert (await dealer.receive(PATIENT_S if arrives else 0.5) is not None) == arrives, size
            finally:
                dealer.close()

    with_router(body, own, Limits(max_message_bytes=20_000))


def test_a_monitor_that_nobody_reads_blocks_nothing() -> None:
    """ZeroMQ's own bound of 2000 events would stop the thread that sends and receives."""
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    configure(server, Limits())
    server.setsockopt(zmq.BACKLOG, 1000)
    monitor = handshake.Monitor(context, server, zmq.EVENT_ALL)
    try:
        address = bind(server, "127.0.0.1", 0)
        for _ in range(800):
            socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))).close()
        with Dealer(address, "late", KINDS) as dealer:
            dealer.send(Note(text=MARK))
            assert server.poll(int(PATIENT_S * 1000))
    finally:
        monitor.close()
        server.close()
        context.term()


class Tap(threading.Thread):
    """A TCP proxy that keeps what it forwards."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        host, port = address.removeprefix("tcp://").rsplit(":", 1)
        self._upstream = socket.create_connection((host, int(port)))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self.start()

    def run(self) -> None:
        client, _ = self._listener.accept()
        back = threading.Thread(target=self._forward, args=(self._upstream, client), daemon=True)
        back.start()
        self._forward(client, self._upstream)
        back.join()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.seen += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return


@pytest.mark.parametrize("name", ["node1", None])
def test_the_wire_shows_nothing(keys: dict[str, Keys], name: str | None) -> None:
    """The case without keys proves that the tap would see it."""
    seen = bytearray()

    async def body(router: AsyncRouter) -> None:
        tap = Tap(router.address)
        own = keys[name] if name is not None else None
        assert await asyncio.to_thread(ask, tap.address, own) == MARK
        seen.extend(tap.seen)

    with_router(body, keys["learner"] if name is not None else None)
    assert len(seen) > 100
    assert (MARK.encode() in seen) == (name is None)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.1.2.3", "eth0"])
def test_sockets_that_leave_the_machine_need_keys(host: str) -> None:
    for server in (AsyncRouter, control.Router):
        with pytest.raises(KeysError, match=r"leaves the loopback interface.*replay\.keys.*network\.insecure"):
            server(host, 0, RUN, KINDS) if server is AsyncRouter else server(host, 0, RUN)


def test_keys_or_consent_open_other_interfaces(keys: dict[str, Keys]) -> None:
    for access in ({"keys": keys["learner"]}, {"insecure": True}):
        AsyncRouter("0.0.0.0", 0, RUN, KINDS, **access).close()
        control.Router("0.0.0.0", 0, RUN, **access).close()
