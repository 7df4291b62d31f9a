"""How asyncio loops and the decode thread talk: commands in, results out, both batched.

A result that wakes its loop by itself costs the decode thread a system call and a fight for the interpreter lock;
so all results of one decode step go to a loop with one wake-up.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rollout_server.engines.base import EngineError

logger = logging.getLogger(__name__)

Handler = Callable[["Future[Any]"], None]
"""Runs in the decode thread and resolves the future, now or later; an EngineError it raises goes to the future."""
_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", "Future[Any]"]


class Mailbox:
    """Commands for one decode thread. `post` and `ask` from any thread, the rest from the decode thread only."""

    def __init__(self, lock: threading.Lock) -> None:
        self._wake = threading.Condition(lock)
        self._commands: deque[tuple[Handler, Future[Any]]] = deque()
        self._taken: set[Future[Any]] = set()
        self._results: deque[_Waiter] = deque()
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def post(self, handler: Handler, future: "Future[Any]") -> None:
        """Run `handler(future)` in the decode thread between two steps. Raises EngineError when it has ended."""
        with self._wake:
            self.raise_if_dead()
            if self._closed:
                raise EngineError("the engine is closed")
            self._commands.append((handler, future))
            self._wake.notify()

    async def ask(self, handler: Handler, future: "Future[Any] | None" = None) -> Any:
        """Post a command and wait for its result, which the handler or someone later puts into `future`.

        Raises EngineError when the handler does, when the thread dies, or when it has ended.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Any] = loop.create_future()
        future = future if future is not None else Future()
        future.add_done_callback(lambda done: self._results.append((loop, waiter, done)))
        self.post(handler, future)
        try:
            return await waiter
        except asyncio.CancelledError:
            # Keeps a command that was not taken yet from running; a taken one goes on.
            future.cancel()
            raise

    def close(self) -> None:
        """Refuse further commands and wake the decode thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    def raise_if_dead(self) -> None:
        """Raises EngineError, with the cause, when the thread has died."""
        if self._failure is not None:
            raise self._death()

    def _death(self) -> EngineError:
        error = EngineError(f"the decode thread died: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error

    def serve(self, has_work: Callable[[], bool]) -> None:
        """Run what was posted; with nothing posted and no work, sleep until there is something or `close`."""
        with self._wake:
            while not (self._commands or self._closed or has_work()):
                self._wake.wait()
            taken = [(handler, future) for handler, future in self._commands if future.set_running_or_notify_cancel()]
            self._commands.clear()
            self._taken.update(future for _, future in taken)
        for handler, future in taken:
            future.add_done_callback(self._taken.discard)
            try:
                handler(future)
            except EngineError as error:
                future.set_exception(error)

    def deliver(self) -> None:
        """Hand results to the loops that wait for them, one wake-up per loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Waiter]] = {}
        while self._results:
            result = self._results.popleft()
            by_loop.setdefault(result[0], []).append(result)
        for loop, results in by_loop.items():
            try:
                loop.call_soon_threadsafe(_settle, results)
            except RuntimeError:
                logger.debug("%d results for an event loop that is closed", len(results))

    def die(self, error: BaseException) -> None:
        """Fail every waiter, and every later call, with `error` as the cause."""
        with self._wake:
            self._failure = error
            waiting = [future for _, future in self._commands if future.set_running_or_notify_cancel()]
            self._commands.clear()
        for future in [*waiting, *self._taken]:
            if not future.done():
                future.set_exception(self._death())
        self.deliver()


def _settle(results: list[_Waiter]) -> None:
    for _, waiter, future in results:
        if waiter.done():
            continue
        error = future.exception()
        if error is None:
            waiter.set_result(future.result())
        else:
            waiter.set_exception(error)
