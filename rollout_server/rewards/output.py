"""What a reward process prints: logged up to a limit, and its end kept for error messages."""

import asyncio
import logging
from typing import IO

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 0.2
MAX_LOGGED_LINES = 200
TAIL_BYTES = 2000
CHUNK_BYTES = 65536
FLOOD_PAUSE_S = 0.002
"""Between two chunks that nobody will see logged: a flood may take 32 MB/s of this process, not all of its time."""


class Output:
    """Reads the pipe for as long as anybody holds its other end, so that printing never blocks a grader for long."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tail = b""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.BaseTransport | None = None

    async def open(self, pipe: IO[bytes]) -> None:
        """Start to read."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        self._task = asyncio.create_task(self._read(reader))

    async def close(self) -> None:
        """Read what is left, for a moment."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_TIMEOUT_S)
            self._task.cancel()
        if self._transport is not None:
            self._transport.close()

    def last_line(self) -> str:
        """The last line printed, or an empty string."""
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:500] if lines else ""

    async def _read(self, reader: asyncio.StreamReader) -> None:
        num_lines = 0
        while chunk := await reader.read(CHUNK_BYTES):
            self._tail = (self._tail + chunk)[-TAIL_BYTES:]
            if num_lines > MAX_LOGGED_LINES:
                await asyncio.sleep(FLOOD_PAUSE_S)
                continue
            for line in chunk.decode("utf-8", "replace").splitlines():
                num_lines += 1
                if num_lines > MAX_LOGGED_LINES:
                    log.warning("%s: printed more than %d lines; the rest is not logged", self._name, MAX_LOGGED_LINES)
                    break
                log.info("%s: %s", self._name, line[:500])
