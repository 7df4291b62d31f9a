"""Frames between the pool and a worker: 4 bytes of length, little-endian, then that many bytes of msgpack.

| from   | message                                                                                   |
|--------|-------------------------------------------------------------------------------------------|
| pool   | first: {"function": str, "timeout_s": float}, then per request: [sample, ...]             |
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
MAX_METRICS = 64


def pack(value: Any) -> bytes:
    """One frame."""
    body = cast(bytes, msgpack.packb(value))
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Any:
    """The value of a frame's body.

    Raises:
        ValueError: it is not msgpack.
    """
    try:
        return msgpack.unpackb(body)
    except msgpack.exceptions.UnpackException as error:
        raise ValueError(f"not msgpack: {error}") from error
