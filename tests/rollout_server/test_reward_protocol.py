"""What the pool believes of a reward process: code of the user shares it, and may have written its replies."""

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_server.rewards.protocol import pack, read_answer, read_verdicts, unpack_reply


def verdict(score: Any = 1.0, metrics: Any = None, error: Any = None, seconds: Any = 0.1) -> list[Any]:
    return [0, score, metrics or {}, error, seconds]


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        ([verdict(), verdict()], "sample 0, which was not asked for"),
        ([verdict(float("nan"))], "score nan"),
        ([verdict(float("inf"))], "score inf"),
        ([verdict(2**63)], "score 9223372036854775808"),
        ([verdict(True)], "score True"),
        ([verdict("1.0")], "score '1.0'"),
        ([verdict(None)], "score None with error None"),
        ([verdict(1.0, error="and why not")], "with error 'and why not'"),
        ([verdict(1.0, {"a": [1.0]})], "metric 'a' = [1.0]"),
        ([verdict(1.0, {7: 1.0})], "int is not allowed for map key"),
        ([verdict(1.0, {str(i): 1.0 for i in range(65)})], "exceeds max_map_len"),
        ([verdict(seconds=-1.0)], "seconds -1.0"),
        ({"verdicts": [verdict()]}, "expected verdicts, found {"),
        ([verdict(msgpack.ExtType(5, b"xx"))], "max_ext_len"),
        ([verdict(None, error="x" * 500_000)], "exceeds max_str_len"),
        ([[1.0]], "expected a verdict"),
        ([], "expected verdicts"),
    ],
)
def test_replies_that_are_no_verdicts_are_refused(reply: Any, named: str) -> None:
    with pytest.raises(ValueError) as raised:
        read_verdicts(unpack_reply(pack(reply)[4:]), {0})
    assert named in str(raised.value)


@pytest.mark.parametrize("body", [b"\xdd\x00\x00\x04\x01" * 1000, b"\xdd\xff\xff\xff\xff"])
def test_lengths_are_refused_before_memory_is_taken(body: bytes) -> None:
    with pytest.raises(ValueError, match="exceeds max_array_len"):
        unpack_reply(body)


@pytest.mark.parametrize("levels", [10, 500, 1000, 100_000])
@pytest.mark.parametrize("head", [b"\x91", b"\x81\xa1k"])
def test_depth_costs_nothing(head: bytes, levels: int) -> None:
    for read, named in ((lambda reply: read_verdicts(reply, {0}), "verdict"), (read_answer, "convention")):
        with pytest.raises(ValueError, match=f"{named}|deep|not msgpack"):
            read(unpack_reply(head * levels + b"\xc0"))


data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200) | st.lists(st.lists(data, min_size=5, max_size=5), max_size=3).map(msgpack.packb))
def test_any_other_reply_raises_only_value_errors(body: bytes) -> None:
    try:
        outcomes = read_verdicts(unpack_reply(body), {0, 1})
    except ValueError:
        outcomes = []
    for index, outcome in outcomes:
        assert index in (0, 1) and (outcome.error is not None or abs(outcome.score) < float("inf"))
    with contextlib.suppress(ValueError):
        read_answer(unpack_reply(body))
