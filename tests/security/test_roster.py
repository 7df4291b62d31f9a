"""Who may connect, while the server runs and the folder of keys changes."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from served_replay import NOTES, PATIENT_S, Note, arrivals, with_router
from zmq.utils import z85

from replay import keys as make_keys
from replay.channel import AsyncRouter, ChannelError, Dealer, Envelope, Keys, WireError, load_keys, roster
from replay.channel.roster import LOOK_S, Roster, name_of, user_id


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


def test_additions_and_removals_are_seen_and_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    who = Roster(load_keys(folder))
    node1 = node(folder, "node1")
    user = who.user(public_of(node1), now=0.0)
    assert user is not None and user == user_id("node1", node1.client_public) and name_of(user) == "node1"
    make_keys.add(folder, "node2")
    node2 = node(folder, "node2")
    with caplog.at_level(logging.INFO, logger="replay.channel.roster"):
        assert who.user(public_of(node2), now=LOOK_S / 2) is None, "the folder is looked at once a second"
        assert name_of(who.user(public_of(node2), now=LOOK_S) or "") == "node2"
        make_keys.remove(folder, "node1")
        assert who.admits(user, now=1.5 * LOOK_S)
        assert not who.admits(user, now=2 * LOOK_S) and who.user(public_of(node1), now=2 * LOOK_S) is None
        make_keys.remove(folder, "node2")
        who.admits(user, now=3 * LOOK_S)
    lines = [record.getMessage() for record in caplog.records]
    for line, name, what in zip(lines, ("node2", "node1", "node2"), ("added", "removed", "removed"), strict=True):
        assert f"key {name}/" in line and f" was {what}" in line and str(folder / "clients") in line


def test_a_folder_that_does_not_change_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who = Roster(load_keys(folder))
    read: list[str] = []
    real = roster.read_key
    monkeypatch.setattr(roster, "read_key", lambda path: (read.append(path.name), real(path))[1])
    for look in range(5):
        assert who.user(b"?" * 32, now=look * LOOK_S) is None
    assert sorted(read) == ["learner.key", "node1.key"]


def test_both_keys_of_a_rotation_have_one_name_and_end_apart(folder: Path) -> None:
    old = node(folder, "node1")
    make_keys.rotate(folder, "node1")
    new = node(folder, "node1")
    who = Roster(load_keys(folder))
    users = [who.user(public_of(keys), now=0.0) or "" for keys in (old, new)]
    assert [name_of(user) for user in users] == ["node1", "node1"] and users[0] != users[1]
    make_keys.remove_old(folder, "node1")
    assert [who.admits(user, now=LOOK_S) for user in users] == [False, True]


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


@pytest.mark.usefixtures("at_once")
def test_a_key_that_is_added_comes_in_without_a_restart(folder: Path) -> None:
    async def body(router: AsyncRouter) -> None:
        make_keys.add(folder, "node2")
        with Dealer(router.address, "r2", NOTES, keys=node(folder, "node2")) as dealer:
            envelope = await hears(router, dealer)
            assert isinstance(envelope, Envelope) and envelope.sender == "node2"

    with_router(body, load_keys(folder))


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
