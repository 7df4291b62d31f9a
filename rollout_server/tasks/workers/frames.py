"""Messages between this process and a child: 4 bytes of length, little-endian, then that much msgpack."""

import math
import os
import reprlib
import socket
import struct
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard, cast

import msgpack

from rollout_server.tasks.workers.supervisor import let_go_of_stdin

if TYPE_CHECKING:
    import asyncio  # takes 40 ms, which a child may do without

LENGTH = struct.Struct("<I")
MAX_ERROR_CHARS = 2000
"""Each at most 4 bytes long."""
MAX_METRICS = 64
"""Numbers beside a score."""


def pack(value: Any) -> bytes:
    """One frame."""
    body = cast(bytes, msgpack.packb(value))
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes, limits: Mapping[str, Any]) -> Any:
    """What a frame holds. Raises ValueError: no msgpack, or past the `limits` of msgpack.unpackb."""
    try:
        return msgpack.unpackb(body, **limits)
    except msgpack.exceptions.UnpackException as error:
        raise ValueError(f"not msgpack: {error}") from error


async def receive(reader: "asyncio.StreamReader", max_bytes: int, limits: Mapping[str, Any]) -> Any:
    """The next message. Raises ValueError: too long, or see `unpack`; IncompleteReadError: the other side is gone."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes, at most {max_bytes} are read")
    return unpack(await reader.readexactly(length), limits)


def read(channel: BinaryIO) -> Any:
    """In a child: the next message, or None when the other side has closed the channel."""
    header = channel.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = channel.read(length)
    return msgpack.unpackb(body) if len(body) == length else None


def private_channel() -> socket.socket:
    """In a child: move the socket away from stdin; prints go to stderr line by line."""
    channel = socket.socket(fileno=os.dup(0))
    os.dup(0)  # stays open to the very end: the other side takes a hang-up for a death, and asks how this has ended
    let_go_of_stdin()
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return channel


def shown(value: Any) -> str:
    """A decoded value for a message: few levels, and few items of each."""
    return reprlib.repr(value)[:200]


def sendable(text: str) -> str:
    """The text, with a question mark for each surrogate: those have no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def metrics_of(said: Any) -> dict[str, float]:
    """Numbers by name, checked. Raises ValueError, for the user to read."""
    if not isinstance(said, Mapping) or len(said) > MAX_METRICS:
        raise ValueError(f"the metrics {shown(said)}; a mapping of at most {MAX_METRICS} names to numbers")
    for name, value in said.items():
        if not isinstance(name, str) or not is_number(value):
            raise ValueError(f"the metric {shown(name)} = {shown(value)} is not a finite number")
    return {name: float(value) for name, value in said.items()}


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number, and no bool."""
    return type(value) in (int, float) and math.isfinite(value)
