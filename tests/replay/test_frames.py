"""Wire frames: every message survives the trip, and nothing that a peer can send raises anything but WireError."""

import dataclasses
import types
import typing
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay import messages as m
from replay.channel.frames import DTYPES, MAX_ARRAYS, Message, WireError, decode, encode, registry

EVERY = {**m.TO_REPLAY, **m.FROM_REPLAY}
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values that fit an annotation of a message."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(values_of(option) for option in arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=3)
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False) | st.integers(-1000, 1000),
        str: st.text(max_size=12),
        bool: st.booleans(),
        Any: PLAIN,
        types.NoneType: st.none(),
    }
    return simple[hint]


@st.composite
def arrays_of(draw: st.DrawFn, dtype: str) -> np.ndarray[Any, Any]:
    size = draw(st.integers(0, 6))
    return np.frombuffer(draw(st.binary(min_size=4 * size, max_size=4 * size)), dtype=DTYPES[dtype]).copy()


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = EVERY[draw(st.sampled_from(sorted(EVERY)))]
    hints = typing.get_type_hints(kind)
    return kind(
        **{
            field.name: draw(
                arrays_of(kind.ARRAYS[field.name]) if field.name in kind.ARRAYS else values_of(hints[field.name])
            )
            for field in dataclasses.fields(kind)
        }
    )


def wire(message: Message, run_id: str = "r1", sequence: int = 1) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, run_id=run_id, sequence=sequence)]


def accept(frames: list[bytes]) -> None:
    """Decode what may be broken: a message comes out or WireError does; any other exception fails the test."""
    try:
        envelope = decode(frames, EVERY)
    except WireError as error:
        assert str(error)
    else:
        assert type(envelope.message) in EVERY.values()


@settings(max_examples=100, deadline=None)
@given(message=messages(), run_id=st.text(max_size=10), sequence=st.integers(0, 2**62))
def test_every_message_survives_the_trip(message: Message, run_id: str, sequence: int) -> None:
    envelope = decode(wire(message, run_id, sequence), EVERY)
    assert (envelope.run_id, envelope.sequence, type(envelope.message)) == (run_id, sequence, type(message))
    for field in dataclasses.fields(message):
        sent, received = getattr(message, field.name), getattr(envelope.message, field.name)
        if field.name in message.ARRAYS:
            assert received.dtype == DTYPES[message.ARRAYS[field.name]] and received.tobytes() == sent.tobytes()
        else:
            assert received == sent and type(received) is type(sent)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=64), max_size=4))
def test_random_bytes_raise_only_wire_errors(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames, EVERY)


@settings(max_examples=100, deadline=None)
@given(PLAIN | st.dictionaries(st.integers(-9, 9) | st.binary(max_size=4) | st.none(), PLAIN, max_size=3), st.binary())
def test_random_msgpack_raises_only_wire_errors(header: Any, frame: bytes) -> None:
    with pytest.raises(WireError):
        decode([msgpack.packb(header), frame], EVERY)


@settings(max_examples=150, deadline=None)
@given(message=messages(), data=st.data())
def test_flipped_and_cut_bytes_raise_only_wire_errors(message: Message, data: st.DataObject) -> None:
    frames = wire(message)
    number = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[number])
    for _ in range(data.draw(st.integers(1, 4))):
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frames[number] = bytes(frame[: data.draw(st.integers(0, len(frame)))] + data.draw(st.binary(max_size=3)))
    accept(frames)


@settings(max_examples=150, deadline=None)
@given(message=messages(), data=st.data())
def test_headers_with_another_value_somewhere_raise_only_wire_errors(message: Message, data: st.DataObject) -> None:
    """The header stays msgpack, one of its parts becomes anything: types, names, dtypes and shapes are checked."""
    frames = wire(message)
    header = msgpack.unpackb(frames[0])
    places: list[tuple[Any, Any]] = [(header, key) for key in header]
    places += [(header["fields"], key) for key in header["fields"]]
    places += [(entry, position) for entry in header["arrays"] for position in range(3)]
    holder, key = data.draw(st.sampled_from(places))
    value = data.draw(PLAIN | st.sampled_from(["Ack", "float64", "object", [2**62], [-1], [1, 1], [True], {}, []]))
    if isinstance(holder, dict) and data.draw(st.booleans()):
        del holder[key]
    else:
        holder[key] = value
    accept([msgpack.packb(header), *frames[1:]])


ACK = m.Ack(pass_=0, index=7, attempt=1, status="accepted")
RESULT = m.EvaluationResult(
    version=3,
    greedy=True,
    seconds=0.5,
    texts=["a"],
    finish_reasons=["stop"],
    rewards=np.ones(1, dtype=np.float32),
    lengths=np.ones(1, dtype=np.int32),
)


def altered(message: Message, **changes: Any) -> list[bytes]:
    frames = wire(message)
    return [msgpack.packb(msgpack.unpackb(frames[0]) | changes), *frames[1:]]


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "0 frames"),
        ([wire(ACK)[0]] + [b""] * (MAX_ARRAYS + 1), "66 frames"),
        (altered(ACK, schema=2), "schema version 2, this side speaks 1"),
        (altered(ACK, kind="Exec"), "kind 'Exec' is not accepted"),
        (altered(ACK, seq="1"), "header.seq is a str"),
        (altered(ACK, extra=1), "header does not have the keys"),
        (altered(ACK, fields={"pass_": 0, "index": 7, "attempt": 1}), "Ack.status: missing"),
        (altered(ACK, fields={"pass_": 0, "index": 7, "attempt": 1, "status": "ok"}), "Ack.status: 'ok'"),
        (altered(ACK, fields={"pass_": True, "index": 7, "attempt": 1, "status": "accepted"}), "Ack.pass_: 'True'"),
        (
            altered(ACK, fields={"pass_": 0, "index": 7, "attempt": 1, "status": "accepted", "code": "x"}),
            "unknown fields ['code']",
        ),
        (wire(RESULT)[:-1], "2 arrays described, 1 frames"),
        ([*wire(RESULT)[:-1], b"123"], "3 bytes for shape [1]"),
        (altered(RESULT, arrays=[["rewards", "float64", [1]], ["lengths", "int32", [1]]]), "dtype 'float64'"),
        (altered(RESULT, arrays=[["rewards", "float32", [1]], ["rewards", "float32", [1]]]), "['lengths'] are missing"),
        (altered(RESULT, arrays=[[["rewards"], "float32", [1]], ["lengths", "int32", [1]]]), "EvaluationResult"),
        (altered(RESULT, arrays=[[{}, "float32", [1]], ["lengths", "int32", [1]]]), "EvaluationResult"),
        (altered(RESULT, arrays=[["other", None, [1]], ["lengths", "int32", [1]]]), "EvaluationResult"),
        (altered(RESULT, arrays=["rewards", "lengths"]), "array description 'rewards'"),
        (altered(RESULT, arrays=[["rewards", "float32", [1, 1]], ["lengths", "int32", [1]]]), "expected one dimension"),
    ],
)
def test_what_is_wrong_is_named(frames: list[bytes], said: str) -> None:
    with pytest.raises(WireError) as caught:
        decode(frames, EVERY)
    assert said in str(caught.value)


def test_a_kind_of_the_other_direction_is_not_accepted() -> None:
    decode(wire(ACK), m.FROM_REPLAY)
    with pytest.raises(WireError, match="kind 'Ack' is not accepted here"):
        decode(wire(ACK), m.TO_REPLAY)
    with pytest.raises(WireError, match="not accepted"):
        decode(wire(ACK), registry())


def test_arrays_arrive_read_only_and_without_a_copy() -> None:
    frames = wire(RESULT)
    received = decode(frames, EVERY).message
    assert isinstance(received, m.EvaluationResult)
    assert not received.rewards.flags.writeable
    assert np.shares_memory(received.rewards, np.frombuffer(frames[1], dtype=np.uint8))
