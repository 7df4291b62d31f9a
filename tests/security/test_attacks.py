"""Attacks on a real replay and what each side hears; with `-s` as a table.

python -m pytest tests/security/test_attacks.py -s
"""

import dataclasses
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import UnionType

import pytest
from served_replay import (
    PATIENT_S,
    RUN,
    Replay,
    greeting,
    long_frame,
    plain_connection,
    raw_dealer,
    read_until_closed,
    ready,
    resident_bytes,
    served,
)

from replay import keys as make_keys
from replay import messages as m
from replay.channel import ChannelError, Dealer, Keys, Message, decode, encode, handshake, load_keys, roster

TEN_GB = 10 * 1000**3
TABLE: list[tuple[str, str, str]] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Print what was recorded, once all attacks have run."""
    yield
    for attack, attacker, server in TABLE:
        sys.stdout.write(f"\n{attack}\n  the attacker: {attacker}\n  replay:       {server}\n")
    sys.stdout.write(f"\n{len(TABLE)} attacks; after each, a peer that keeps to the rules was served\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys.make(tmp_path / "keys", ["node1"], force=False)
    make_keys.export(tmp_path / "keys", "node1", tmp_path / "node1")
    make_keys.make(tmp_path / "other", ["node1"], force=False)
    return tmp_path


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "PATIENCE_S", 0.5)
    monkeypatch.setattr(roster, "LOOK_S", 0.0)


def keys_of(folder: Path, name: str = "keys") -> Keys:
    return load_keys(folder / name)


def hello(role: str, name: str) -> m.Hello:
    return m.Hello(role=role, name=name, pid=1, host="h")  # type: ignore[arg-type]


def answer(dealer: Dealer, kind: type[Message] | UnionType) -> Message:
    """The first message of a kind that replay sends."""
    deadline = time.monotonic() + PATIENT_S
    while time.monotonic() < deadline:
        envelope = dealer.poll(0.2)
        if envelope is not None and isinstance(envelope.message, kind):
            return envelope.message
    raise AssertionError(f"no {kind} came")


def still_serves(replay: Replay, keys: Keys | None) -> None:
    with Dealer(replay.address, f"honest.{time.monotonic_ns()}", m.FROM_REPLAY, keys=keys) as dealer:
        dealer.send(m.StatusRequest())
        answer(dealer, m.Status)


def refused(replay: Replay, keys: Keys | None) -> str:
    """What a DEALER of ours is told when it tries to speak with replay."""
    with Dealer(replay.address, "attacker", m.FROM_REPLAY, keys=keys) as dealer, pytest.raises(ChannelError) as caught:
        dealer.send(m.StatusRequest())
        answer(dealer, m.Status)
    return str(caught.value)


# ---- without a key that is listed -----------------------------------------------------------------------


def test_wrong_key(folder: Path) -> None:
    own = dataclasses.replace(keys_of(folder, "node1"), server_public=keys_of(folder, "other").server_public)
    with served(keys_of(folder)) as replay:
        says = refused(replay, own)
        line = replay.log.wait_for("has the public key of another server")
        still_serves(replay, keys_of(folder))
    assert "its key is not" in says
    TABLE.append(("another server's public key (a server that is not what it says)", says, line))


def test_a_key_that_is_not_on_the_list(folder: Path) -> None:
    own = dataclasses.replace(keys_of(folder, "other"), server_public=keys_of(folder).server_public)
    with served(keys_of(folder)) as replay:
        says = refused(replay, own)
        line = replay.log.wait_for("is not in")
        still_serves(replay, keys_of(folder))
    assert "refused the key of this node" in says
    TABLE.append(("a key that is not on the list", says, line))


def test_plain_text_to_a_port_with_keys(folder: Path) -> None:
    with served(keys_of(folder)) as replay:
        says = refused(replay, None)
        line = replay.log.wait_for("has no keys")
        still_serves(replay, keys_of(folder))
    assert "wants CURVE keys and this node has none" in says
    TABLE.append(("plain text to a port with keys", says, line))


def test_another_protocol(folder: Path) -> None:
    with served(keys_of(folder)) as replay, plain_connection(replay.port) as connection:
        connection.sendall(b"POST /update_weights HTTP/1.1\r\nHost: replay\r\nContent-Length: 0\r\n\r\n" + bytes(64))
        said = read_until_closed(connection)
        still_serves(replay, keys_of(folder))
    assert b"HTTP" not in said and len(said) <= 64, said
    told = f"{len(said)} bytes of ZMTP greeting, then the connection is closed"
    TABLE.append(("HTTP to a port with keys", told, "nothing: ZeroMQ ends the handshake"))


def test_keys_to_a_port_without(folder: Path) -> None:
    with served(None) as replay:
        says = refused(replay, keys_of(folder, "node1"))
        still_serves(replay, None)
    assert "speaks without CURVE" in says
    TABLE.append(("CURVE to a port without keys", says, "nothing: it knows no keys, and ZeroMQ ends the handshake"))


def stays_open(connection: socket.socket) -> bool:
    """Whether the server says what it has to say, and then waits."""
    connection.settimeout(0.5)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return True
    return False


@pytest.mark.parametrize("where", ["in the handshake", "after it"])
def test_ten_gigabytes_announced(folder: Path, where: str) -> None:
    """A length within the limit is waited for, which shows that it is the length that ends the connection."""
    keys = keys_of(folder) if where == "in the handshake" else None
    before_it = greeting(b"CURVE") if keys is not None else greeting(b"NULL") + ready(b"big")
    with served(keys) as replay:
        with plain_connection(replay.port) as connection:
            connection.sendall(before_it + long_frame(1_000_000, command=keys is not None))
            assert stays_open(connection)
        before = resident_bytes()
        with plain_connection(replay.port) as connection:
            connection.sendall(before_it + long_frame(TEN_GB, command=keys is not None))
            read_until_closed(connection)
        grown = max(0, resident_bytes() - before)
        still_serves(replay, keys)
    assert grown < 8_000_000, grown
    says = f"nothing: ZeroMQ refuses the length before it takes memory ({grown // 1024} kB more)"
    TABLE.append((f"a message of 10 GB announced {where}", "its connection is closed", says))


# ---- with a key that is, or was, listed -----------------------------------------------------------------


def test_a_removed_key(folder: Path) -> None:
    with served(keys_of(folder)) as replay:
        with Dealer(replay.address, "r1", m.FROM_REPLAY, keys=keys_of(folder, "node1")) as dealer:
            dealer.send(hello("rollout_server", "rollout-1"))
            answer(dealer, m.Welcome)
            make_keys.remove(folder / "keys", "node1")
            dealer.send(m.LeaseRequest(capacity=4, version=0))
            with pytest.raises(ChannelError) as caught:
                answer(dealer, m.Lease)
        line = replay.log.wait_for("was removed from")
        replay.log.wait_for("lost 'rollout-1'")
        still_serves(replay, keys_of(folder))
    assert "refused the key of this node, 'node1'" in str(caught.value)
    TABLE.append(("a key that was removed while its peer was connected", str(caught.value), line))


def test_a_stolen_identity(folder: Path) -> None:
    with served(keys_of(folder)) as replay:
        with Dealer(replay.address, "learner-0.1f", m.FROM_REPLAY, keys=keys_of(folder)) as learner:
            learner.send(hello("learner", "learner-0"))
            answer(learner, m.Welcome)
        time.sleep(0.3)  # while its owner is connected, ZeroMQ ignores a second connection of an identity
        with Dealer(replay.address, "learner-0.1f", m.FROM_REPLAY, keys=keys_of(folder, "node1")) as thief:
            thief.send(m.Committed(step=1, digest="d"))
            line = replay.log.wait_for("belongs to key 'learner'")
            time.sleep(0.3)
            heard = thief.poll(0)
        still_serves(replay, keys_of(folder))
    assert "this came with key 'node1'" in line and line.endswith("[closed]")
    assert heard is None or isinstance(heard.message, m.Heartbeat)
    TABLE.append(("the identity of the learner, with the key of a rollout node", "its connection is closed", line))


def test_a_replayed_message(folder: Path) -> None:
    recorded = encode(m.Published(version=7, digest="d"), RUN, 1_000)
    with served(keys_of(folder)) as replay:
        with raw_dealer(replay.address, "learner-0.1f", keys_of(folder)) as dealer:
            for _ in range(2):
                dealer.send_multipart(recorded)
            line = replay.log.wait_for("came before")
            answers = [decode(dealer.recv_multipart(), m.FROM_REPLAY).message for _ in range(2)]
        still_serves(replay, keys_of(folder))
    (last,) = [message for message in answers if isinstance(message, m.Refused) and "say Hello" not in message.reason]
    assert "message 1000 came before" in line and line.endswith("[duplicate]") and "came before" in last.reason
    TABLE.append(("a recorded message, sent again", f"Refused: {last.reason}", line))


def test_a_wrong_run_id(folder: Path) -> None:
    with served(keys_of(folder)) as replay:
        with raw_dealer(replay.address, "r1", keys_of(folder, "node1")) as dealer:
            dealer.send_multipart(encode(hello("rollout_server", "rollout-1"), "another-run", 1))
            message = decode(dealer.recv_multipart(), m.FROM_REPLAY).message
            line = replay.log.wait_for("another-run")
        still_serves(replay, keys_of(folder))
    assert isinstance(message, m.Refused) and f"run id 'another-run', this is {RUN!r}" in message.reason
    TABLE.append(("the id of another run", f"Refused: {message.reason}", line))


def test_a_rollout_key_that_says_it_is_the_learner(folder: Path) -> None:
    with served(keys_of(folder)) as replay:
        with Dealer(replay.address, "learner-0.2a", m.FROM_REPLAY, keys=keys_of(folder, "node1")) as dealer:
            dealer.send(hello("learner", "learner-0"))
            message = answer(dealer, m.Refused)
            line = replay.log.wait_for("may not be a learner")
        still_serves(replay, keys_of(folder))
    assert isinstance(message, m.Refused) and "the key 'node1' may not be a learner" in message.reason
    TABLE.append(("a rollout node's key that says it is the learner", f"Refused: {message.reason}", line))


NODES = {"rollout": "node2:0", "learner": "node0:0; node1:0"}


def says_hello(replay: Replay, identity: str, keys: Keys, rank: int) -> str:
    """The reason for which replay refuses a learner's Hello; "" for Welcome."""
    with Dealer(replay.address, identity, m.FROM_REPLAY, keys=keys) as dealer:
        dealer.send(dataclasses.replace(hello("learner", f"learner-{rank}"), rank=rank))
        message = answer(dealer, m.Welcome | m.Refused)
        return message.reason if isinstance(message, m.Refused) else ""


def test_a_rollout_key_that_says_it_is_a_rank_of_another_learner_node(tmp_path: Path) -> None:
    make_keys.make(tmp_path / "keys", ["node1", "node2", "nodes"], force=False)
    keys = {"learner": keys_of(tmp_path)}
    for name in ("node1", "node2", "nodes"):
        make_keys.export(tmp_path / "keys", name, tmp_path / name)
        keys[name] = keys_of(tmp_path, name)
    with served(keys["learner"], **NODES) as replay:
        assert says_hello(replay, "learner-0.0a", keys["learner"], 0) == ""
        assert says_hello(replay, "learner-1.1a", keys["node1"], 1) == ""
        reason = says_hello(replay, "learner-1.2a", keys["node2"], 1)
        line = replay.log.wait_for("may not be a learner")
        assert "'node2'" in reason and "['node1']" in reason and "--add NODE" in reason
        assert "'nodes'" in says_hello(replay, "learner-1.3a", keys["nodes"], 1), "shared with a node for rollouts"
        assert "'node1'" in says_hello(replay, "learner-0.4a", keys["node1"], 0)
        still_serves(replay, keys["learner"])
    TABLE.append(("a rollout node's key that says it is a rank of another learner node", f"Refused: {reason}", line))


def test_a_shared_key_of_learner_nodes_alone_stays_valid(folder: Path) -> None:
    make_keys.make(folder / "shared", ["nodes"], force=False)
    make_keys.export(folder / "shared", "nodes", folder / "nodes")
    with served(keys_of(folder, "shared"), rollout="node0:1", learner="node0:0; node1:0") as replay:
        assert says_hello(replay, "learner-1.1a", keys_of(folder, "nodes"), 1) == ""
