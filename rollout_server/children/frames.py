"""Messages between this process and a child: 4 bytes of length, little-endian, then that much msgpack."""

import struct
from typing import Any, cast

import msgpack

LENGTH = struct.Struct("<I")


def pack(value: Any) -> bytes:
    """One frame."""
    body = cast(bytes, msgpack.packb(value))
    return LENGTH.pack(len(body)) + body
