"""The thread of the torch engine, and whose turn it is: a decode step's, or a call's between two of them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import torch

from rollout_server.engines.base import Completion, EngineError

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Turns:
    """One thread that computes; coroutines take turns between its steps. When a step fails, all waiters fail."""

    def __init__(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._thread = ThreadPoolExecutor(1, "torch-engine", torch.set_num_threads, (num_threads,))
        self._turn = asyncio.Condition()
        """Of whoever changes the lanes; notified after each."""
        self._asking = 0
        """Calls that wait for their turn."""
        self._ended: EngineError | None = None
        """Why the engine takes no more calls."""

    def _go_on(self) -> None:
        """A turn has ended."""

    def _died(self) -> list["Future[list[Completion]]"]:
        """Forget all requests, which the thread's death has ended; what waits for them."""
        return []

    def _raise_if_ended(self) -> None:
        """Raises EngineError, with the cause, when the engine was closed or a step has failed."""
        if self._ended is not None:
            raise self._ended

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        """The lanes are the caller's, after those that asked before. Raises EngineError: the engine has ended."""
        self._raise_if_ended()
        self._asking += 1
        try:
            await self._turn.acquire()
        finally:
            self._asking -= 1
        try:
            self._raise_if_ended()
            yield
        finally:
            self._go_on()
            self._turn.notify_all()
            self._turn.release()

    async def _in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run what computes in the thread. An error there is the end of the engine."""
        try:
            run = asyncio.get_running_loop().run_in_executor
            return await run(self._thread, torch.inference_mode()(call), *arguments)
        except Exception as error:
            logger.exception("the decode thread of the torch engine died")
            self._ended = died = EngineError(f"the decode thread died: {type(error).__name__}: {error}")
            for future in self._died():
                future.set_exception(died)
            raise died from error
