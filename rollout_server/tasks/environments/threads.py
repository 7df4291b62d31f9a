"""Threads for synchronous tools: a call waits for a free one before it starts."""

import asyncio
import contextvars
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from configs.errors import SlipstreamError


class NoThread(SlipstreamError, RuntimeError, code="SLIP-ENV-05"):
    """No thread became free for a tool's call; the message names the tools that hold them."""


class Threads:
    """An executor without a queue, so that a limit on a call's time can begin with the call."""

    def __init__(self, most: int) -> None:
        self._executor = ThreadPoolExecutor(most, thread_name_prefix="tools")
        self._free = asyncio.Semaphore(most)
        self._held: dict[Future[Any], tuple[str, float]] = {}
        """By call: its tool, and when it began."""

    async def start(
        self, tool: str, function: Callable[..., Any], values: Mapping[str, Any], wait_s: float
    ) -> asyncio.Future[Any]:
        """Wait for a free thread and call a function in it. The thread is taken until the function ends.

        Raises NoThread: none was free within `wait_s`; what holds them, the tool with the most calls first.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._free.acquire()
        except TimeoutError as error:
            now, since = time.monotonic(), dict[str, list[float]]()
            for name, began in self._held.values():
                since.setdefault(name, []).append(now - began)
            most = sorted(since.items(), key=lambda one: -len(one[1]))
            held = "; ".join(f"{len(ages)} of {name}, the longest since {max(ages):.0f} s" for name, ages in most)
            raise NoThread(
                f"{tool} waited {wait_s:g} s for one of {len(self._held)} threads: calls that have not returned hold"
                f" them ({held})"
            ) from error
        loop = asyncio.get_running_loop()
        running = self._executor.submit(contextvars.copy_context().run, partial(function, **values))
        self._held[running] = (tool, time.monotonic())
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended, running))
        return asyncio.wrap_future(running)

    def _ended(self, running: Future[Any]) -> None:
        del self._held[running]
        self._free.release()
