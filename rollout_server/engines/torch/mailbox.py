"""How asyncio loops and the decode thread talk: actions in, results out."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rollout_server.engines.base import EngineError

Action = Callable[[], None]


class Mailbox:
    """Actions for one decode thread, which calls `serve` and `die`; others call the rest."""

    def __init__(self, lock: threading.Lock) -> None:
        self._wake = threading.Condition(lock)
        self._posted: list[tuple[Action, Future[Any], bool]] = []
        """With the future of each, and whether the action's end is its result."""
        self._unanswered: set[Future[Any]] = set()
        self._failure: BaseException | None = None
        self.closed = False

    def post(self, action: Action, result: "Future[Any] | None" = None) -> "Future[Any]":
        """Run `action` in the decode thread between two steps. Raises EngineError when that has ended.

        An EngineError of the action goes to the result. Something puts one into `result` then or later; where that is
        not given, the action's end is the result.
        """
        future = Future() if result is None else result
        with self._wake:
            self.raise_if_dead()
            if self.closed:
                raise EngineError("the engine is closed")
            self._posted.append((action, future, result is None))
            self._wake.notify()
        return future

    async def ask(self, action: Action, result: "Future[Any] | None" = None) -> Any:
        """As `post`, and wait for the result; cancelled in time, the action does not run."""
        return await asyncio.wrap_future(self.post(action, result))

    def close(self) -> None:
        """Refuse further actions and wake the decode thread."""
        with self._wake:
            self.closed = True
            self._wake.notify()

    def raise_if_dead(self) -> None:
        """Raises EngineError, with the cause, when the thread has died."""
        if self._failure is not None:
            raise self._death() from self._failure

    def _death(self) -> EngineError:
        return EngineError(f"the decode thread died: {type(self._failure).__name__}: {self._failure}")

    def serve(self, has_work: Callable[[], bool]) -> None:
        """Run what was posted; with nothing to do, sleep until there is something or `close`."""
        with self._wake:
            while not (self._posted or self.closed or has_work()):
                self._wake.wait()
            taken = [command for command in self._posted if command[1].set_running_or_notify_cancel()]
            self._posted.clear()
            self._unanswered.update(future for _, future, _ in taken)
        for action, future, at_its_end in taken:
            future.add_done_callback(self._unanswered.discard)
            try:
                action()
            except EngineError as error:
                future.set_exception(error)
            else:
                if at_its_end:
                    future.set_result(None)

    def die(self, cause: BaseException) -> None:
        """Fail every waiter, and every later call, with `cause`."""
        with self._wake:
            self._failure = cause
            waiting = [future for _, future, _ in self._posted if future.set_running_or_notify_cancel()]
            self._posted.clear()
        for future in [*waiting, *self._unanswered]:
            error = self._death()
            error.__cause__ = cause
            future.set_exception(error)
