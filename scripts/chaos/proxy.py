"""A proxy in front of replay or a publisher: its links are cut, slow or frozen, or change a message.

It passes TCP on and reads ZMTP as it goes, so identities, handshakes and reconnects are the real ones. One asyncio loop
in a thread serves all links; the harness's thread changes their state.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal

from scripts.chaos.zmtp import GREETING_BYTES, ZmtpMessage, read_message

Direction = Literal["up", "down"]
"""`up` is from the rollout server to replay."""
LOOK_S = 0.02


@dataclass(slots=True)
class Intercept:
    """What happens to the next message of a direction that `wanted` names, once. Example: give it twice."""

    wanted: Callable[[ZmtpMessage], bool]
    change: Callable[[ZmtpMessage], list[bytes]]
    """The bytes that go on instead, a message each; none loses it."""
    hold_for_next: bool = False
    """Give it after the message that follows it."""
    done: threading.Event = field(default_factory=threading.Event)
    kind: str = ""
    """Of the message that was changed."""


class Link:
    """One proxied address, whose state other threads may change at any time."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream, self.address = upstream, ""
        self.delay_s = 0.0
        """Wait before each message."""
        self.frozen: set[Direction] = set()
        """Nothing passes in these directions; connections stay open."""
        self.closed_until = 0.0
        """No connection is accepted before this monotonic time."""
        self.intercepts: dict[Direction, list[Intercept]] = {"up": [], "down": []}
        self.holding: dict[Direction, str] = {}
        """A kind of message that freezes its direction when it comes, before it passes."""
        self.held: dict[Direction, threading.Event] = {"up": threading.Event(), "down": threading.Event()}
        self.passed: Counter[str] = Counter()
        """Messages by kind."""
        self.orphans = False
        """When the rollout server's side ends, replay's stays open until this is off (its host has vanished)."""
        self.writers: set[asyncio.StreamWriter] = set()

    def intercept(self, direction: Direction, message: ZmtpMessage) -> Intercept | None:
        """The first intercept that wants this message; it is used up."""
        for intercept in self.intercepts[direction] if message.is_message else ():
            if intercept.wanted(message):
                self.intercepts[direction].remove(intercept)
                intercept.kind = message.kind
                return intercept
        return None

    def abort(self) -> None:
        """Close its connections at both ends, in the thread of the proxy."""
        for writer in self.writers:
            writer.transport.abort()


class Proxy:
    """All links of a run; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._servers: list[asyncio.Server] = []
        self._links: list[Link] = []

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
        self._links.append(link)
        return link

    def cut(self, link: Link, *, closed_for_s: float = 0.0) -> None:
        """Close its connections at both ends, and accept none for a while."""
        link.closed_until = time.monotonic() + closed_for_s
        self._loop.call_soon_threadsafe(link.abort)

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self, link: Link) -> None:
        server = await asyncio.start_server(lambda r, w: self._serve(link, r, w), "127.0.0.1", 0, limit=1 << 22)
        link.address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._servers.append(server)

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for link in self._links:
            link.frozen, link.orphans = set(), False
            link.abort()

    async def _serve(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a rollout server."""
        try:
            if time.monotonic() < link.closed_until:
                raise ConnectionRefusedError
            up_reader, up_writer = await asyncio.open_connection(*link.upstream, limit=1 << 22)
        except OSError:
            writer.transport.abort()  # cut, or replay is not there: the client meets a closed connection
            return
        link.writers |= {writer, up_writer}
        up = asyncio.create_task(self._pump(link, "up", reader, up_writer))
        down = asyncio.create_task(self._pump(link, "down", up_reader, writer))
        try:
            await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
            while link.orphans and up.done():  # noqa: ASYNC110 (another thread turns it off)
                await asyncio.sleep(LOOK_S)
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            for end in (writer, up_writer):
                end.transport.abort()
                link.writers.discard(end)

    async def _pump(
        self, link: Link, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass one direction of a connection on, message by message, until it ends."""
        late: Intercept | None = None
        behind: list[bytes] = []
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            await _pass_greeting(reader, writer)
            while True:
                message = await read_message(reader)
                await self._wait(link, direction, message)
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

    async def _wait(self, link: Link, direction: Direction, message: ZmtpMessage) -> None:
        """Delays and freezes, before a message passes."""
        if message.is_message:
            kind = message.kind
            if link.holding.get(direction) == kind:
                del link.holding[direction]
                link.frozen.add(direction)
                link.held[direction].set()
            link.passed[kind] += 1
            if link.delay_s:
                await asyncio.sleep(link.delay_s)
        while direction in link.frozen:  # noqa: ASYNC110 (another thread lets it go)
            await asyncio.sleep(LOOK_S)


async def _pass_greeting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Bytes as they come: each side sends the rest of its greeting only when it has seen how the other's begins."""
    left = GREETING_BYTES
    while left:
        piece = await reader.read(left)
        if not piece:
            raise ConnectionError("ended in the greeting")
        left -= len(piece)
        writer.write(piece)
