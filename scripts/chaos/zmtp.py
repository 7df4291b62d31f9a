"""Just enough of ZMTP 3 (rfc.zeromq.org/spec/23) to tell messages apart in a TCP stream that a proxy passes on.

After a greeting of 64 bytes each side sends frames: one byte of flags, a size of 1 or 8 bytes, the body. Frames that
are no commands make messages; the MORE flag says that another frame of the same message follows.
"""

import asyncio
import struct
from dataclasses import dataclass, replace

import msgpack

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
MAX_BODY_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as it stood on the wire."""

    flags: int
    body: bytes

    def wire(self) -> bytes:
        """Its bytes."""
        long = len(self.body) > 255
        flags = (self.flags & ~LONG) | (LONG if long else 0)
        size = struct.pack(">Q", len(self.body)) if long else struct.pack("B", len(self.body))
        return bytes([flags]) + size + self.body


@dataclass(frozen=True, slots=True)
class ZmtpMessage:
    """A command, or all frames of one message."""

    frames: tuple[Frame, ...]

    @property
    def is_message(self) -> bool:
        """Whether it is no command of the handshake."""
        return not self.frames[0].flags & COMMAND

    @property
    def kind(self) -> str:
        """Message kind by our header, `command`, or `sealed` where CURVE hides it."""
        if not self.is_message:
            return "command"
        try:
            header = msgpack.unpackb(self.frames[0].body)
        except (ValueError, msgpack.exceptions.UnpackException):
            return "sealed"
        return str(header["kind"]) if isinstance(header, dict) and "kind" in header else "sealed"

    def wire(self) -> bytes:
        """Its bytes."""
        return b"".join(frame.wire() for frame in self.frames)

    def flipped(self, frame: int, position: float) -> "ZmtpMessage":
        """The same with one bit of one frame's body turned; `position` from 0 (first byte) to 1 (last)."""
        body = bytearray(self.frames[frame].body)
        body[min(len(body) - 1, int(position * len(body)))] ^= 0x10
        changed = replace(self.frames[frame], body=bytes(body))
        return ZmtpMessage((*self.frames[:frame], changed, *self.frames[frame + 1 :]))


async def read_message(reader: asyncio.StreamReader) -> ZmtpMessage:
    """The next command or whole message.

    Raises:
        asyncio.IncompleteReadError: the connection ended.
        ValueError: this is no ZMTP 3.
    """
    frames: list[Frame] = []
    while True:
        flags = (await reader.readexactly(1))[0]
        if flags & ~(MORE | LONG | COMMAND):
            raise ValueError(f"flags {flags:#04x} of a frame")
        size = await reader.readexactly(8 if flags & LONG else 1)
        length = int.from_bytes(size, "big")
        if length > MAX_BODY_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        frames.append(Frame(flags, await reader.readexactly(length)))
        if not flags & MORE:
            return ZmtpMessage(tuple(frames))


def largest_array(message: ZmtpMessage) -> int:
    """Position of the largest frame behind the header; the header's own when there is none with bytes."""
    return max(range(len(message.frames)), key=lambda i: len(message.frames[i].body) if i else 0)
