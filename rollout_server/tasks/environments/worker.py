"""The work of an environment process (workers/worker.py).

All its episodes share one event loop. A thread watches that loop: where a function of the user blocks it, the others
wait, so stderr says for how long, in which file and line, and of which episode.
"""

import asyncio
import inspect
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from rollout_server.tasks.environments import EnvironmentFailed, EpisodeOver, Trajectory
from rollout_server.tasks.environments.client import Client
from rollout_server.tasks.environments.protocol import LIMITS, MAX_BYTES, read_outcome, shown
from rollout_server.tasks.workers.frames import MAX_ERROR_CHARS, pack, receive
from slipstream.runtime.loading import describe, function_of, is_asynchronous

BUILT_IN = {
    "agent": "rollout_server.tasks.agents.episode:rollout",
    "tools": "rollout_server.tasks.environments.tool_loop:rollout",
}
Rollout = Callable[..., Coroutine[Any, Any, Any]]

BLOCKED_S = 1.0
"""From here on a loop that stands still is reported."""
TICK_S = 0.1
EPISODE = "episode "
"""Begins the name of an episode's tasks."""


class Watch:
    """Sees a blocked event loop from a thread beside it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._tick, self._thread = loop, time.monotonic(), threading.get_ident()
        self.blocked_s: dict[str, float] = {}
        """By the name of the task that blocked: for how long altogether."""
        self._blames: tuple[str, float] | None = None
        self._beat()
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _beat(self) -> None:
        now = time.monotonic()
        if self._blames is not None:
            name, since = self._blames
            self.blocked_s[name] = self.blocked_s.get(name, 0.0) + now - since
            self._blames = None
        self._tick = now
        self._loop.call_later(TICK_S, self._beat)

    def _run(self) -> None:
        woke = time.monotonic()
        while True:
            time.sleep(TICK_S)
            before, woke = woke, time.monotonic()
            tick, silent = self._tick, woke - self._tick
            is_starved = woke - before > 3 * TICK_S  # then the machine, and no function, kept the loop from running
            if silent > BLOCKED_S and self._blames is None and not is_starved:
                task = asyncio.current_task(self._loop)
                name = task.get_name() if task is not None else "a callback"
                self._blames = (name, tick)
                place = _place(sys._current_frames().get(self._thread))
                sys.stderr.write(
                    f"{name} has blocked the event loop of all episodes for {silent:.1f} s at {place}; await what takes"
                    " time, or give it to asyncio.to_thread\n"
                )
                sys.stderr.flush()


def _place(frame: Any) -> str:
    """The innermost line of a stack that is not asyncio's or the standard library's own."""
    stack = traceback.extract_stack(frame) if frame is not None else []
    library = os.path.dirname(os.__file__)
    own = [one for one in stack if not one.filename.startswith(library) or "site-packages" in one.filename]
    if not stack:
        return "an unknown place"
    at = (own or stack)[-1]
    return f"{at.filename}:{at.lineno} in {at.name}: {at.line}"


def named_alike(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> "asyncio.Task[Any]":
    """A task with the name of the episode that starts it: what blocks in it, that episode blocks."""
    starter = asyncio.current_task(loop)
    if options.get("name") is None and starter is not None and starter.get_name().startswith(EPISODE):
        options["name"] = starter.get_name()
    return asyncio.Task(coroutine, loop=loop, **options)


class EpisodeWorker:
    """Runs episodes until the server closes the channel."""

    def __init__(self, function: Rollout, order: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self._function, self._writer = function, writer
        self._of_all = (order["options"], order["temperature"], order["turn_timeout_s"])
        loop = asyncio.get_running_loop()
        loop.set_task_factory(named_alike)
        self._watch = Watch(loop)
        self._episodes: dict[int, tuple[asyncio.Task[None], Client]] = {}

    def take(self, message: Any) -> None:
        """React to one message of the server."""
        kind, episode, *rest = message
        if kind == "start":
            row, seed, prompt_seed = rest
            client = Client(seed, prompt_seed, *self._of_all, episode, self._send)
            task = asyncio.create_task(self._run(episode, row, client), name=f"{EPISODE}{episode}")
            self._episodes[episode] = (task, client)
            task.add_done_callback(lambda _: self._never_ran(episode))
            return
        if episode not in self._episodes:
            return
        task, client = self._episodes[episode]
        if kind == "cancel":
            self._send(["cancelling", episode])
            task.cancel()
        elif kind in ("answer", "over"):
            client.answered(*rest)
        elif kind == "part":
            client.told(*rest)

    def _never_ran(self, episode: int) -> None:
        """An episode that was cancelled before its first step has not said that it has ended."""
        if self._episodes.pop(episode, None) is not None:
            self._send(["cancelled", episode])

    async def _run(self, episode: int, row: dict[str, Any], client: Client) -> None:
        try:
            said = await self._outcome(row, client)
            said["blocked_s"] = self._watch.blocked_s.pop(f"{EPISODE}{episode}", 0.0)
            read_outcome(said)  # what is wrong with it is the function's error
            answer: list[Any] = ["done", episode, said]
            pack(answer)
        except asyncio.CancelledError:
            answer = ["cancelled", episode]
        except BaseException as error:  # noqa: BLE001 - code of the user: whatever it raises ends this episode alone
            answer = ["failed", episode, describe(error)[:MAX_ERROR_CHARS]]
        finally:
            del self._episodes[episode]
        self._send(answer)

    async def _outcome(self, row: dict[str, Any], client: Client) -> dict[str, Any]:
        try:
            value = await self._function(row, client)
        except EpisodeOver as over:
            value = Trajectory(reward=0.0, metrics={f"episode/{type(over).__name__}": 1.0})
        match value:
            case Trajectory():
                found = value
            case {"score": score, **metrics}:
                found = Trajectory(reward=score, metrics=dict[Any, Any](metrics))
            case None | bool() | int() | float():
                found = Trajectory(reward=None if value is None else float(value))
            case _:
                wanted = "a number, a mapping with `score`, None or a Trajectory"
                raise ValueError(f"the function returned {shown(value)}; return {wanted}")
        return {"reward": found.reward, "metrics": dict(found.metrics), "leave_out": list(found.leave_out)}

    def _send(self, message: list[Any]) -> None:
        self._writer.write(pack(message))


def load_rollout(spec: str, options: Mapping[str, Any]) -> Rollout:
    """Load an environment's function with its options, its keyword-only parameters.

    Where its module has a function `prepare`, that gets them, and checks them; the function has `client.options`.

    Raises EnvironmentFailed: not found, not importable, not `async def f(row, client)`, or not usable here.
    """
    module, function = function_of("environment.function", spec, EnvironmentFailed, BUILT_IN)
    needed = [
        key
        for key, one in inspect.signature(function).parameters.items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if not is_asynchronous(function) or len(needed) != 2:
        raise EnvironmentFailed(
            f"environment.function: {spec!r} has the parameters ({', '.join(needed)}) and is"
            f" {'' if is_asynchronous(function) else 'not '}asynchronous; take"
            f" `async def {spec.rpartition(':')[2]}(row, client)`"
        )
    if (prepare := getattr(module, "prepare", None)) is not None:
        prepare(options)
        return function
    from slipstream.runtime.variants import checked  # here, because it imports pydantic

    given = checked("environment.function", spec, function, options, failed=EnvironmentFailed)
    return partial(function, **given)


def work(channel: socket.socket) -> int:
    """Load the function and run episodes until the server closes the channel; the exit code."""
    return asyncio.run(_work(channel))


async def _work(channel: socket.socket) -> int:
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    order = await receive(reader, MAX_BYTES, LIMITS)
    try:
        function = load_rollout(order["function"], order["options"])
    except EnvironmentFailed as error:
        writer.write(pack({"error": str(error)[:MAX_ERROR_CHARS]}))
        await writer.drain()
        return 1
    writer.write(pack({"ready": True}))
    worker = EpisodeWorker(function, order, writer)
    try:
        while True:
            worker.take(await receive(reader, MAX_BYTES, LIMITS))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0
