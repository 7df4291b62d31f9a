"""A proxy in front of replay or a publisher: its links are cut, slow or frozen, or change a message.

It passes TCP on and reads ZMTP as it goes, so identities, handshakes and reconnects are the real ones. One asyncio loop
in a thread serves all links; the harness's thread changes their state. Of ZMTP 3 (rfc.zeromq.org/spec/23) just enough:
after a greeting of 64 bytes come frames of one byte of flags, a size of 1 or 8 bytes, and the body. Frames that are no
commands make messages; MORE says that another frame of the same message follows.
"""

import asyncio
import contextlib
import struct
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgpack

Direction = Literal["up", "down"]  # `up` is from the rollout server to replay
LOOK_S = 0.02
GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Frame:
    flags: int
    body: bytes

    def wire(self) -> bytes:
        size = len(self.body)
        if size > 255:
            return struct.pack(">BQ", self.flags | LONG, size) + self.body
        return struct.pack("BB", self.flags & ~LONG, size) + self.body


@dataclass(frozen=True, slots=True)
class ZmtpMessage:
    """A command, or all frames of one message."""

    frames: tuple[Frame, ...]

    @property
    def is_message(self) -> bool:
        return not self.frames[0].flags & COMMAND

    @property
    def kind(self) -> str:
        """Message kind by our header, `command`, or `sealed` where CURVE hides it."""
        if not self.is_message:
            return "command"
        try:
            return str(msgpack.unpackb(self.frames[0].body)["kind"])
        except (ValueError, TypeError, LookupError, msgpack.exceptions.UnpackException):
            return "sealed"

    def wire(self) -> bytes:
        return b"".join(frame.wire() for frame in self.frames)

    def flipped(self, frame: int, position: float) -> "ZmtpMessage":
        """The same with one bit of one frame's body turned; `position` from 0 (first byte) to 1 (last)."""
        body = bytearray(self.frames[frame].body)
        body[min(len(body) - 1, int(position * len(body)))] ^= 0x10
        changed = replace(self.frames[frame], body=bytes(body))
        return ZmtpMessage((*self.frames[:frame], changed, *self.frames[frame + 1 :]))

    @property
    def largest_array(self) -> int:
        """Position of the largest frame behind the header; the header's own when there is none with bytes."""
        return max(range(len(self.frames)), key=lambda i: len(self.frames[i].body) if i else 0)


async def read_message(reader: asyncio.StreamReader) -> ZmtpMessage:
    """The next command or whole message. Raises asyncio.IncompleteReadError at the end."""
    frames: list[Frame] = []
    while not frames or frames[-1].flags & MORE:
        flags = (await reader.readexactly(1))[0]
        length = int.from_bytes(await reader.readexactly(8 if flags & LONG else 1), "big")
        frames.append(Frame(flags, await reader.readexactly(length)))
    return ZmtpMessage(tuple(frames))


Change = Callable[[ZmtpMessage], list[bytes]]
"""The bytes that go on instead of a message, a message each; none loses it."""


def times(number: int) -> Change:
    return lambda message: [message.wire()] * number


@dataclass(slots=True)
class Intercept:
    """What happens to the next message of a direction that `wanted` names, once. Example: give it twice."""

    wanted: Callable[[ZmtpMessage], bool]
    change: Change
    hold_for_next: bool = False  # give it after the message that follows it
    done: threading.Event = field(default_factory=threading.Event)
    kind: str = ""  # of the message that was changed


class Link:
    """One proxied address, whose state other threads may change at any time."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream, self.address = upstream, ""
        self.delay_s = 0.0  # before each message
        self.frozen: set[Direction] = set()  # nothing passes in these directions; connections stay open
        self.closed_until = 0.0  # no connection is accepted before this monotonic time
        self.intercepts: dict[Direction, list[Intercept]] = {"up": [], "down": []}
        self.holding: dict[Direction, str] = {}  # a kind of message that freezes its direction before it passes
        self.held: dict[Direction, threading.Event] = {"up": threading.Event(), "down": threading.Event()}
        self.orphans = False
        """When the rollout server's side ends, replay's stays open until this is off (its host has vanished)."""
        self.writers: set[asyncio.StreamWriter] = set()

    def intercept(self, direction: Direction, message: ZmtpMessage) -> Intercept | None:
        """The first intercept that wants this message; it is used up."""
        found = next((i for i in self.intercepts[direction] if message.is_message and i.wanted(message)), None)
        if found is not None:
            self.intercepts[direction].remove(found)
            found.kind = message.kind
        return found

    def abort(self) -> None:
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """All links of a run; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._links: dict[Link, asyncio.Server] = {}

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def link(self, address: str) -> Link:
        """A new link to `tcp://host:port`; its `address` is what the rollout server is given."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        link = Link((host, int(port)))
        self._call(self._listen(link))
        return link

    def cut(self, link: Link, *, closed_for_s: float = 0.0) -> None:
        link.closed_until = time.monotonic() + closed_for_s
        self._loop.call_soon_threadsafe(link.abort)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self, link: Link) -> None:
        server = await asyncio.start_server(lambda r, w: _serve(link, r, w), "127.0.0.1", 0)
        link.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._links[link] = server

    async def _close(self) -> None:
        for link, server in self._links.items():
            server.close()
            link.frozen, link.orphans = set(), False
            link.abort()


async def _serve(link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        if time.monotonic() < link.closed_until:
            raise ConnectionRefusedError
        up_reader, up_writer = await asyncio.open_connection(*link.upstream)
    except OSError:
        writer.transport.abort()  # cut, or replay is not there: the client meets a closed connection
        return
    link.writers |= {writer, up_writer}
    up = asyncio.create_task(_pump(link, "up", reader, up_writer))
    down = asyncio.create_task(_pump(link, "down", up_reader, writer))
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        while link.orphans and up.done():  # noqa: ASYNC110 (another thread turns it off)
            await asyncio.sleep(LOOK_S)
    finally:
        up.cancel()
        down.cancel()
        await asyncio.gather(up, down, return_exceptions=True)
        for end in (writer, up_writer):
            end.transport.abort()
            link.writers.discard(end)


async def _pump(link: Link, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass one direction of a connection on, message by message, until it ends."""
    late: Intercept | None = None
    behind: list[bytes] = []
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        # as it comes: each side sends the rest of its greeting only when it has seen how the other's begins
        for _ in range(GREETING_BYTES):
            writer.write(await reader.readexactly(1))
        while True:
            message = await read_message(reader)
            await _wait(link, direction, message)
            pieces = [message.wire()]
            if late is None:
                late = link.intercept(direction, message)
                if late is not None:
                    pieces = late.change(message)
                    if late.hold_for_next:
                        behind, pieces = pieces, []
                        continue
            elif message.is_message:
                pieces += behind
            if late is not None and message.is_message:
                late.done.set()
                late = None
            writer.writelines(pieces)
            await writer.drain()


async def _wait(link: Link, direction: Direction, message: ZmtpMessage) -> None:
    if message.is_message:
        if link.holding.get(direction) == message.kind:
            del link.holding[direction]
            link.frozen.add(direction)
            link.held[direction].set()
        if link.delay_s:
            await asyncio.sleep(link.delay_s)
    while direction in link.frozen:  # noqa: ASYNC110 (another thread lets it go)
        await asyncio.sleep(LOOK_S)
