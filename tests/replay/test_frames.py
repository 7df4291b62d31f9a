"""Wire frames: every message survives the trip, and nothing that a peer can send raises anything but WireError."""

import dataclasses
import random
import tracemalloc
from typing import Any, TypeVar

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from typing_extensions import TypeAliasType

from replay import messages as m
from replay.channel import Message, WireError, decode, encode, registry
from replay.channel import frames as frames_module
from replay.channel.fields import MAX_DEPTH
from replay.channel.frames import CRC_BYTES, CRC_MARK, DTYPES, MAX_ARRAYS, checksum
from tests.replay.simulation.samples import make_result
from tests.security.fuzz.mutations import Mutator
from tests.security.fuzz.samples import Samples

EVERY = {**m.TO_REPLAY, **m.FROM_REPLAY}
MESSAGES = st.integers(0, 2**32).map(lambda seed: Samples(EVERY, random.Random(seed), dict).any())


def wire(message: Message, run_id: str = "r1", sequence: int = 1) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, run_id=run_id, sequence=sequence)]


def sealed(header: Any, arrays: list[bytes]) -> list[bytes]:
    """Frames with a header of any content and the right checksum, where the header still ends with one."""
    packed = msgpack.packb(header)
    if packed[:-CRC_BYTES][-len(CRC_MARK) :] != CRC_MARK:
        return [packed, *arrays]
    return [packed[:-CRC_BYTES] + checksum(packed[:-CRC_BYTES], arrays), *arrays]


@settings(max_examples=100)
@given(message=MESSAGES, run_id=st.text(max_size=10), sequence=st.integers(0, 2**62))
def test_every_message_survives_the_trip(message: Message, run_id: str, sequence: int) -> None:
    envelope = decode(wire(message, run_id, sequence), EVERY)
    assert (envelope.run_id, envelope.sequence, type(envelope.message)) == (run_id, sequence, type(message))
    for field in dataclasses.fields(message):
        sent, received = getattr(message, field.name), getattr(envelope.message, field.name)
        if field.name in message.ARRAYS:
            assert received.dtype == DTYPES[message.ARRAYS[field.name]] and received.tobytes() == sent.tobytes()
        else:
            assert received == sent and type(received) is type(sent)


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=64), max_size=4))
def test_random_bytes_raise_only_wire_errors(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames, EVERY)


@settings(max_examples=300)
@given(message=MESSAGES, seed=st.integers(0, 2**32))
def test_flipped_and_cut_bytes_raise_only_wire_errors(message: Message, seed: int) -> None:
    """And whatever else the fuzzer does to frames, headers and values; half of them get the right checksum again."""
    try:
        envelope = decode(Mutator(random.Random(seed)).mutate(wire(message)), EVERY)
    except WireError as error:
        assert str(error)
    else:
        assert type(envelope.message) in EVERY.values()


ACK = m.Ack(pass_=0, index=7, attempt=1, status="accepted")
RESULT = make_result(3)


def altered(message: Message, **changes: Any) -> list[bytes]:
    frames = wire(message)
    header = msgpack.unpackb(frames[0])
    checksum_last = {"crc": header.pop("crc")}
    return sealed(header | changes | checksum_last, frames[1:])


def altered_arrays(described: list[Any]) -> list[bytes]:
    """RESULT with another description, and as many frames of four bytes."""
    header = msgpack.unpackb(wire(RESULT)[0]) | {"arrays": described}
    return sealed(header, [b"1234"] * len(described))


FIELDS = {"pass_": 0, "index": 7, "attempt": 1, "status": "accepted"}
RESULT_FIELDS = msgpack.unpackb(wire(RESULT)[0])["fields"]
LENGTHS = ["lengths", "int32", [1]]


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "0 frames"),
        ([wire(ACK)[0]] + [b""] * (MAX_ARRAYS + 1), "66 frames"),
        (altered(ACK, schema=1), "schema version 1, this side speaks 8; update the older side"),
        (altered(ACK, seq=-1), "header.seq -1 is not within 0 to 2^62"),
        (altered(ACK, seq=2**62 + 1), "is not within 0 to 2^62"),
        (altered(ACK, kind="Exec"), "kind 'Exec' is not accepted"),
        (altered(ACK, seq="1"), "header.seq is a str"),
        (altered(ACK, extra=1), "header does not have the keys"),
        (altered(ACK, fields=RESULT_FIELDS), "Ack.pass_: missing"),
        (altered(ACK, fields=FIELDS | {"status": "ok"}), "Ack.status: 'ok'"),
        (altered(ACK, fields=FIELDS | {"pass_": True}), "Ack.pass_: True is no int"),
        (altered(ACK, fields=FIELDS | {"index": -2}), "Ack.index: -2"),
        (altered(ACK, fields=FIELDS | {"index": 2**64 - 1}), "Ack.index: 18446744073709551615"),
        (altered(RESULT, fields=RESULT_FIELDS | {"seconds": float("nan")}), "EvaluationResult.seconds: nan"),
        (altered(RESULT, fields=RESULT_FIELDS | {"rewards": []}), "unknown fields ['rewards']"),
        (altered(ACK, fields=FIELDS | {"code": "x"}), "unknown fields ['code']"),
        (wire(RESULT)[:-2], "damaged on the way"),
        (sealed(msgpack.unpackb(wire(RESULT)[0]), [b"1234"]), "2 arrays described, 1 frames"),
        (sealed(msgpack.unpackb(wire(RESULT)[0]), [b"1234", b"123"]), "3 bytes for shape [1]"),
        (altered(RESULT, arrays=[["rewards", "float64", [1]], LENGTHS]), "dtype 'float64'"),
        (altered_arrays([["rewards", "float32", [1]]]), "arrays ['lengths'] are missing"),
        (altered_arrays([["rewards", "float32", [1]], LENGTHS, LENGTHS]), "EvaluationResult.lengths: comes twice"),
        (altered(RESULT, arrays=[[["rewards"], "float32", [1]], LENGTHS]), "EvaluationResult"),
        (altered(RESULT, arrays=[[{}, "float32", [1]], LENGTHS]), "EvaluationResult"),
        (altered(RESULT, arrays=[["other", None, [1]], LENGTHS]), "EvaluationResult"),
        (altered(RESULT, arrays=["rewards", "lengths"]), "array description 'rewards'"),
        (altered(RESULT, arrays=[["rewards", "float32", [1, 1]], LENGTHS]), "expected one dimension"),
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


def test_every_changed_bit_is_noticed() -> None:
    frames = wire(RESULT)
    for number, frame in enumerate(frames):
        for bit in range(8 * len(frame)):
            changed = bytearray(frame)
            changed[bit // 8] ^= 1 << bit % 8
            with pytest.raises(WireError):
                decode([*frames[:number], bytes(changed), *frames[number + 1 :]], EVERY)


def nested(depth: int, kind: str = "list") -> bytes:
    """`depth` lists or maps in one another, one or three bytes each."""
    return (b"\x91" if kind == "list" else b"\x81\xa1a") * depth + b"\xc0"


def with_raw(message: Message, field: str, raw: bytes) -> list[bytes]:
    """A message with a field that consists of these bytes of msgpack, whatever they are."""
    frames = wire(message)
    header, mark = msgpack.unpackb(frames[0]), "<here>"
    header["fields"][field] = mark
    packed = msgpack.packb(header).replace(msgpack.packb(mark), raw)
    return [packed[:-CRC_BYTES] + checksum(packed[:-CRC_BYTES], frames[1:]), *frames[1:]]


@pytest.mark.parametrize("kind", ["list", "map"])
@pytest.mark.parametrize("depth", [MAX_DEPTH + 2, 300, 900, 1_000, 100_000])
@pytest.mark.parametrize("message", [ACK, m.Status(state={})], ids=lambda message: type(message).__name__)
def test_deep_nesting_is_refused(message: Message, depth: int, kind: str) -> None:
    field = "status" if isinstance(message, m.Ack) else "state"
    with pytest.raises(WireError) as caught:
        decode(with_raw(message, field, nested(depth, kind)), EVERY)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "raw",
    [
        b"\x81\xc4\x01a\xc0",  # a key of bytes
        b"\x81\xa1a\x81\xc4\x01a\xc0",  # one further down
        b"\x81\x01\xc0",  # a key that is a number
        b"\x81\xa1a\xc4\x01a",  # bytes
        b"\xd6\xff\0\0\0\0",  # a timestamp
        b"\x81\xa1a\xd4\x2a\0",  # an extension
    ],
)
def test_what_json_does_not_know_is_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        decode(with_raw(m.Status(state={}), "state", raw), EVERY)


FEW = 1 << 15


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd" + (4 * FEW).to_bytes(4, "big") + b"\x80" * (4 * FEW),
        b"\x94" + (b"\xdd" + (FEW // 2).to_bytes(4, "big") + b"\x90" * (FEW // 2)) * 4,
        b"\xdd" + (40 * FEW).to_bytes(4, "big") + b"\xc0" * (40 * FEW),
        b"\xdf" + (4 * FEW).to_bytes(4, "big") + b"".join(b"\xa5%05x\xc0" % number for number in range(4 * FEW)),
    ],
    ids=["one list", "four lists", "nothing, often", "one map"],
)
def test_a_header_of_many_small_objects_is_refused_before_it_takes_their_memory(
    raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames_module, "MAX_ITEMS", FEW)
    frames = with_raw(m.Status(state={}), "state", b"\x81\xa1a" + raw)
    tracemalloc.start()
    with pytest.raises(WireError, match="not msgpack"):
        decode(frames, EVERY)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 120 * FEW, f"{peak} bytes for a frame of {len(frames[0])}"


def test_arrays_are_found_by_their_annotation_in_every_numpy(monkeypatch):
    """From numpy 2.5 on NDArray[int32] is an alias, where it was ndarray[shape, dtype[int32]] before."""
    scalar = TypeVar("scalar", bound=np.generic)
    alias = TypeAliasType("NDArray", np.ndarray[Any, np.dtype[scalar]], type_params=(scalar,))
    concrete = np.ndarray[Any, np.dtype[np.int32]]
    hints = (concrete, NDArray[np.float32], dict[str, int], int)
    assert [frames_module.dtype_of(hint) for hint in hints] == ["int32", "float32", "", ""]
    monkeypatch.setattr(frames_module, "NDArray", alias)
    assert [frames_module.dtype_of(hint) for hint in (alias[np.uint8], concrete)] == ["uint8", "int32"]
