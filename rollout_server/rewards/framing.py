"""Frames between the pool and a worker: 4 bytes of length, little-endian, then that many bytes of msgpack.

| from   | message                                                                                   |
|--------|-------------------------------------------------------------------------------------------|
| pool   | first: {"function": str, "timeout_s": float, "limits": {key: int}}, then [sample, ...]    |
| worker | first: {"convention": str, "is_async": bool} or {"error": str}                            |
| worker | per request, until every sample has one: [[index, score, metrics, error, seconds], ...]   |
"""

import struct
from typing import Any, cast

import msgpack

LENGTH = struct.Struct("<I")
MAX_REQUEST_BYTES = 32 * 1024 * 1024
MAX_REPLY_BYTES = 1024 * 1024
MAX_ERROR_CHARS = 2000
"""Each at most 4 bytes long."""
MAX_METRICS = 64
REPLY_LIMITS = {
    "max_array_len": 1024,
    "max_map_len": MAX_METRICS,
    "max_str_len": 4 * MAX_ERROR_CHARS,
    "max_bin_len": 0,
    "max_ext_len": 0,
}
"""A reply that announces more in any place is refused before memory is taken for it. msgpack itself goes 1024 deep, on
a stack of its own; what is deeper than a verdict is then refused by its type, without looking into it."""


def pack(value: Any) -> bytes:
    """One frame."""
    body = cast(bytes, msgpack.packb(value))
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """The value of a frame from the pool. Raises ValueError: it is not msgpack."""
    return _unpack(body, {})


def unpack_reply(body: bytes) -> Any:
    """The value of a frame from a worker, which code of the user may have written.

    Raises:
        ValueError: it is not msgpack, or holds more than a reply may.
    """
    return _unpack(body, REPLY_LIMITS)


def _unpack(body: bytes, limits: dict[str, int]) -> Any:
    try:
        return msgpack.unpackb(body, **limits)
    except msgpack.exceptions.UnpackException as error:
        raise ValueError(f"not msgpack: {error}") from error
