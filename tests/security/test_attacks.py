"""Attacks on a real replay and what each side hears. What a router alone refuses: test_admission.py, test_roster.py."""

import dataclasses
import time
from pathlib import Path
from types import UnionType

import pytest
from served_replay import (
    PATIENT_S,
    RUN,
    Replay,
    greeting,
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


def keys_of(folder: Path, *nodes: str) -> dict[str, Keys]:
    """New keys of a learner and these nodes."""
    make_keys.make(folder / "keys", nodes, force=False)
    for name in nodes:
        make_keys.export(folder / "keys", name, folder / name)
    return {"learner": load_keys(folder / "keys")} | {name: load_keys(folder / name) for name in nodes}


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


def test_a_key_that_is_not_on_the_list(keys: dict[str, Keys], tmp_path: Path) -> None:
    stranger = keys_of(tmp_path / "other", "node1")["node1"]
    own = dataclasses.replace(stranger, server_public=keys["learner"].server_public)
    with served(keys["learner"]) as replay:
        with Dealer(replay.address, "attacker", m.FROM_REPLAY, keys=own) as dealer:
            dealer.send(m.StatusRequest())
            with pytest.raises(ChannelError, match="refused the key of this node"):
                answer(dealer, m.Status)
        replay.line("is not in")


def test_another_protocol(keys: dict[str, Keys]) -> None:
    with served(keys["learner"]) as replay, plain_connection(replay.port) as connection:
        connection.sendall(b"POST /update_weights HTTP/1.1\r\nHost: replay\r\nContent-Length: 0\r\n\r\n" + bytes(64))
        said = read_until_closed(connection)
    assert b"HTTP" not in said and len(said) <= 64, said


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
    (last,) = [message for message in answers if isinstance(message, m.Refused) and "say Hello" not in message.reason]
    assert "message 1000 came before" in line and line.endswith("[duplicate]") and "came before" in last.reason


def test_a_wrong_run_id(keys: dict[str, Keys]) -> None:
    with served(keys["learner"]) as replay, raw_dealer(replay.address, "r1", keys["node1"]) as dealer:
        dealer.send_multipart(encode(hello("rollout_server", "rollout-1"), "another-run", 1))
        message = decode(dealer.recv_multipart(), m.FROM_REPLAY).message
        replay.line("another-run")
    assert isinstance(message, m.Refused) and f"run id 'another-run', this is {RUN!r}" in message.reason


def says_hello(replay: Replay, identity: str, keys: Keys, rank: int) -> str:
    """The reason for which replay refuses a learner's Hello; "" for Welcome."""
    with Dealer(replay.address, identity, m.FROM_REPLAY, keys=keys) as dealer:
        dealer.send(hello("learner", f"learner-{rank}", rank))
        message = answer(dealer, m.Welcome | m.Refused)
        return message.reason if isinstance(message, m.Refused) else ""


def test_a_rollout_key_that_says_it_is_the_learner(keys: dict[str, Keys]) -> None:
    with served(keys["learner"]) as replay:
        reason = says_hello(replay, "learner-0.2a", keys["node1"], 0)
        replay.line("may not be a learner")
    assert "the key 'node1' may not be a learner" in reason


def test_a_rollout_key_that_says_it_is_a_rank_of_another_learner_node(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "node1", "node2", "nodes")
    with served(keys["learner"], rollout="node2:0", learner="node0:0; node1:0") as replay:
        assert says_hello(replay, "learner-0.0a", keys["learner"], 0) == ""
        assert says_hello(replay, "learner-1.1a", keys["node1"], 1) == ""
        reason = says_hello(replay, "learner-1.2a", keys["node2"], 1)
        assert "'node2'" in reason and "['node1']" in reason and "--add NODE" in reason
        replay.line("may not be a learner")
        assert "'nodes'" in says_hello(replay, "learner-1.3a", keys["nodes"], 1), "shared with a node for rollouts"
        assert "'node1'" in says_hello(replay, "learner-0.4a", keys["node1"], 0)


def test_a_shared_key_of_learner_nodes_alone_stays_valid(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, "nodes")
    with served(keys["learner"], rollout="node0:1", learner="node0:0; node1:0") as replay:
        assert says_hello(replay, "learner-1.1a", keys["nodes"], 1) == ""
