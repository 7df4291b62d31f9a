"""Who may connect, whose identity it is, and which messages came before: the rules alone, then on real sockets."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils import z85

from replay import keys as make_keys
from replay.channel import AsyncRouter, ChannelError, Dealer, Keys, load_keys, roster, routing_id
from replay.channel.admission import (
    MAX_IDENTITIES,
    TOKEN_BYTES,
    WINDOW,
    Admission,
    DuplicateMessage,
    Window,
    identity_of,
    may_be,
)
from replay.channel.frames import Envelope, WireError, encode
from replay.channel.roster import LOOK_S, Roster
from tests.security.raw_peers import greeting, plain_connection, raw_dealer, ready
from tests.security.served_replay import NOTES, RUN, Note, arrivals, keys_of, with_router
from tests.support.waiting import PATIENT_S


@settings(max_examples=200)
@given(st.lists(st.integers(0, 40) | st.integers(0, 4 * WINDOW) | st.integers(0, 2**62), max_size=80))
def test_every_number_is_taken_once_and_none_from_before_the_window(numbers: list[int]) -> None:
    window, taken, highest = Window(), set(), -1
    for number in numbers:
        old = highest >= 0 and number <= highest - WINDOW
        if old or number in taken:
            with pytest.raises(DuplicateMessage, match="older than the last 1024" if old else "came before"):
                window.take(number)
        else:
            window.take(number)
            taken.add(number)
            highest = max(highest, number)


def test_an_identity_belongs_to_the_first_key_that_used_it() -> None:
    admission = Admission()
    peer = admission.bind("learner-0.ab", "learner/0123", b"a")
    assert admission.bind("learner-0.ab", "learner/4567", b"b") is peer, "another key of the same name"
    assert (peer.user, peer.route) == ("learner/4567", b"b"), "what is sent to it takes the connection it has now"
    for identity in ("learner-0.ab", "learner-0.ab/beat"):
        with pytest.raises(WireError, match=r"'learner-0\.ab' belongs to key 'learner', this came with key 'node1'"):
            admission.bind(identity, "node1/89ab", b"c")
    assert peer.route == b"b"
    admission.bind("r0.cd/beat", "node1/89ab", b"r")
    assert getattr(admission.get("r0.cd"), "route", b"") == b"r", "a server that was started again hears beats first"


def test_a_sender_of_many_identities_pushes_out_only_its_own() -> None:
    admission = Admission()
    learner = admission.bind("learner-0", "learner/01", b"")
    for number in range(3 * MAX_IDENTITIES):
        admission.bind(f"many-{number}", "node1/23", b"")
    assert len(admission) == MAX_IDENTITIES + 1
    assert admission.get("learner-0") is learner and admission.get("many-0") is None
    with pytest.raises(WireError, match="belongs to key 'learner'"):
        admission.bind("learner-0", "node1/23", b"")


@pytest.mark.parametrize(
    "frame", [b"", b"\0abcd", b"a\nreplay: the run ends", b"\xff\xfe", b"x" * 201, "a\u202eb".encode()]
)
def test_identities_are_printable_text(frame: bytes) -> None:
    token = b"\0" + bytes(TOKEN_BYTES)
    assert identity_of("röllout 7.1f3a/beat".encode() + token) == "röllout 7.1f3a/beat"
    with pytest.raises(WireError, match="identity") as caught:
        identity_of(frame + token)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("role", "key", "nodes", "named"),
    [
        ("learner", "learner", set(), None),
        ("learner", "", set(), None),  # without keys nothing is known of anybody
        ("learner", "node1", set(), ["the key 'node1' may not be a learner", "'learner'"]),
        ("launcher", "node1", set(), ["the key 'node1' may not be a launcher", "'learner'"]),
        ("learner", "node1", {"node1"}, None),  # a rank above 0 has the key of its own node
        ("learner", "learner", {"node1"}, None),
        ("learner", "node2", {"node1"}, ["'node2'", "['node1']"]),
        ("rollout_server", "node1", set(), None),
        ("rollout_server", "learner", set(), None),
    ],
)
def test_the_key_says_which_roles_a_peer_may_have(
    role: str, key: str, nodes: set[str], named: list[str] | None
) -> None:
    problem = may_be(role, key, nodes)
    assert (problem is None) == (named is None)
    assert all(part in str(problem) for part in named or [])


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Keys]:
    return keys_of(tmp_path_factory.mktemp("keys"), "node1")


def test_a_damaged_message_uses_up_no_number() -> None:
    """A number is believed only when the checksum has proven it: or one flipped bit would shut its peer out."""

    async def body(router: AsyncRouter) -> None:
        with raw_dealer(router.address, "r0") as dealer:
            header = bytearray(encode(Note(), RUN, 2**40)[0])
            header[-1] ^= 1
            dealer.send_multipart([bytes(header), b""])
            dealer.send_multipart(encode(Note(), RUN, 1))
            dealer.send_multipart(encode(Note(), "another-run", 2))
            damaged, whole, strange = await arrivals(router, 3)
        assert isinstance(damaged[1], WireError) and isinstance(whole[1], Envelope)
        assert isinstance(strange[1], WireError) and "run id 'another-run'" in str(strange[1])

    with_router(body)


def half_open(router: AsyncRouter) -> socket.socket:
    """A connection that has finished its handshake as r0 and is never closed by its peer."""
    connection = plain_connection(int(router.address.rpartition(":")[2]))
    connection.sendall(greeting(b"NULL"))
    said = b""
    while len(said) < len(greeting(b"NULL")):
        said += connection.recv(4096)
    connection.sendall(ready(routing_id("r0")) + b"\x00\x00")
    return connection


def test_a_peer_is_heard_while_its_old_connection_is_half_open_and_after_that_ends() -> None:
    async def body(router: AsyncRouter) -> None:
        with half_open(router) as old:
            await arrivals(router, 1)  # its empty message is refused: the router has admitted the identity
            with Dealer(router.address, "r0", NOTES) as dealer:
                dealer.send(Note(text="during"))
                during = await arrivals(router, 1)
                old.close()
                dealer.send(Note(text="after"))
                after = await arrivals(router, 1)
        heard = [found.message for _, found in during + after if isinstance(found, Envelope)]
        assert [note.text for note in heard if isinstance(note, Note)] == ["during", "after"]

    with_router(body)


def test_a_live_route_cannot_be_taken_with_another_key(keys: dict[str, Keys]) -> None:
    """An intruder that knows the identity claims it while messages go to its peer."""
    count, name = 400, "rollout-0.1f"

    async def body(router: AsyncRouter) -> dict[str, int]:
        got = {"peer": 0, "intruder": 0}
        with Dealer(router.address, name, NOTES, keys=keys["learner"]) as peer:
            peer.send(Note())
            await arrivals(router, 1)
            with raw_dealer(router.address, name, keys["node1"]) as intruder:
                for number in range(count):
                    if number % 40 == 20:
                        intruder.send_multipart(encode(Note(), RUN, number))
                    await router.send(name, Note(text=str(number)))
                    while await router.receive() is not None:
                        pass
                    await asyncio.sleep(0.002)
                while intruder.poll(500):
                    intruder.recv_multipart()
                    got["intruder"] += 1
            while await asyncio.to_thread(peer.poll, 0.5) is not None:
                got["peer"] += 1
            return got

    assert with_router(body, keys["learner"]) == {"peer": count, "intruder": 0}


def test_many_frames_of_an_allowed_size_are_too_large_together() -> None:
    async def body(router: AsyncRouter) -> None:
        with raw_dealer(router.address, "r0") as dealer:
            dealer.send_multipart([b"x" * 9_000] * 3)
            ((_, refused),) = await arrivals(router, 1)
        assert "message of 27019 bytes is above 10000 (network.max_message_bytes)" in str(refused)

    with_router(body, max_message_bytes=10_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys.make(tmp_path / "keys", ["node1"], force=False)
    return tmp_path / "keys"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is looked at every time."""
    monkeypatch.setattr(roster, "LOOK_S", 0.0)


def node(folder: Path, name: str) -> Keys:
    """What a node of this name holds now."""
    out = folder.parent / f"{name}-{time.monotonic_ns()}"
    make_keys.export(folder, name, out)
    return load_keys(out)


def public_of(keys: Keys) -> bytes:
    return bytes(z85.decode(keys.client_public))


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("nonsense"), lambda path: path.chmod(0o622)])
def test_a_key_that_cannot_be_trusted_is_left_out_and_the_others_stay(
    folder: Path, spoil: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    who = Roster(load_keys(folder))
    node1, learner = node(folder, "node1"), load_keys(folder)
    spoil(folder / "clients" / "node1.key")
    for look in range(3):
        assert who.user(public_of(node1), now=look * LOOK_S) is None
        assert who.user(public_of(learner), now=look * LOOK_S) is not None
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and "node1.key" in errors[0] and "left out" in errors[0]


def test_a_folder_that_is_gone_admits_nobody(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    who, learner = Roster(load_keys(folder)), load_keys(folder)
    assert who.user(public_of(learner), now=0.0)
    folder.rename(folder.parent / "elsewhere")
    assert who.user(public_of(learner), now=LOOK_S) is None
    assert "cannot be read, so nobody may connect" in caplog.text


async def hears(router: AsyncRouter, dealer: Dealer) -> Envelope | WireError:
    dealer.send(Note())
    return (await arrivals(router, 1))[0][1]


def test_the_gate_itself_looks_again_after_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "LOOK_S", 0.2)

    async def body(router: AsyncRouter) -> None:
        for name in ("node2", "node3"):  # nothing is sent before the second one knocks, which would be a look too
            make_keys.add(folder, name)
            await asyncio.sleep(0.3)
            with Dealer(router.address, name, NOTES, keys=node(folder, name)) as dealer:
                assert dealer.poll(0.3) is None
        dealer = Dealer(router.address, "r3", NOTES, keys=node(folder, "node3"))
        assert isinstance(await hears(router, dealer), Envelope)
        dealer.close()

    with_router(body, load_keys(folder))


@pytest.mark.usefixtures("at_once")
def test_a_removed_key_is_refused_at_its_next_message_and_cut_off(folder: Path) -> None:
    async def body(router: AsyncRouter) -> None:
        own = node(folder, "node1")
        with (
            Dealer(router.address, "r1", NOTES, keys=own) as dealer,
            Dealer(router.address, "l0", NOTES, keys=load_keys(folder)) as learner,
        ):
            for each in (dealer, learner):
                assert isinstance(await hears(router, each), Envelope)
            assert await router.send("r1", Note(text="a"))
            assert (await asyncio.to_thread(dealer.poll, PATIENT_S)) is not None
            make_keys.remove(folder, "node1")
            assert not await router.send("r1", Note(text="b")), "nothing more goes to it"
            refused = await hears(router, dealer)
            assert isinstance(refused, WireError) and "the key 'node1' was removed from" in str(refused)
            with pytest.raises(ChannelError, match=r"refused the key of this node, 'node1'"):
                await asyncio.to_thread(dealer.poll, PATIENT_S)  # its connection was cut, so it has tried again
            assert isinstance(await hears(router, learner), Envelope)
            assert await router.send("l0", Note(text="c"))

    with_router(body, load_keys(folder))
