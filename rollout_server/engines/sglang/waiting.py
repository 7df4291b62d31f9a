"""Bounded waits for the engine's own requests, which end when SGLang dies."""

import asyncio
import time
from collections.abc import Callable

from rollout_server.engines.base import EngineError


class Waits:
    """A condition that is checked again after each `changed`."""

    def __init__(self, check_alive: Callable[[], None]) -> None:
        self._check_alive = check_alive
        self._condition = asyncio.Condition()

    async def changed(self) -> None:
        """A request has ended, or a pin."""
        async with self._condition:
            self._condition.notify_all()

    async def until(self, done: Callable[[], bool], limit_s: float, what: str, *, look_s: float = 1.0) -> None:
        """Wait until `done()`; looks again at each change and every `look_s`, and whether SGLang lives.

        Raises:
            EngineError: SGLang is dead, or `limit_s` have passed; `what` says for what an update waited.
        """
        started = time.monotonic()
        while not done():
            waited = time.monotonic() - started
            if waited > limit_s:
                raise EngineError(f"an update waited {waited:.0f} s for {what} [slow]")
            self._check_alive()
            try:
                async with asyncio.timeout(look_s), self._condition:
                    if not done():
                        await self._condition.wait()
            except TimeoutError:
                continue
