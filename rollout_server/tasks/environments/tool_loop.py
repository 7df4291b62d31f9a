"""The built-in tool loop: `environment.function: tools`. Turns and tools alternate until an answer calls none.

options  tools: names of environments/tools.py, `path/to/file.py:function`, `mcp:command with arguments`
         system: text of a system message, put before the prompt
         max_tool_chars: what a tool says is cut there (default 4096)
         tool_timeout_s: a tool that takes longer has failed (default 20); its wait for a thread does not count
         allow_unisolated: let the Python tool run programs where the machine cannot isolate them (default no)

What is wrong with a call (no JSON, an unknown tool, an exception) is what the tool says: the episode goes on, and the
policy may learn from it. The last answer is judged by reward.function.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

from configs.errors import SlipstreamError
from rollout_server.tasks.environments import EnvironmentFailed, EpisodeOver, Trajectory
from rollout_server.tasks.environments.client import Client
from rollout_server.tasks.environments.tool_calls import Tool
from rollout_server.tasks.environments.tools import load_tools
from rollout_server.tasks.workers.frames import sendable

OPTIONS = {"tools", "system", "max_tool_chars", "tool_timeout_s", "allow_unisolated"}
MAX_THREADS = 64
"""Calls of tools without `async` that run at once, over all episodes of the process; further ones wait."""
WAIT = 0.9
"""Of environment.turn_timeout_s, for a thread; past the whole of it the server fails the episode, and knows no tool."""
_tools: dict[str, Tool] = {}
_threads: list["Threads"] = []


class NoThread(SlipstreamError, RuntimeError, code="SLIP-ENV-05"):
    """No thread became free for a tool's call; the message names the tools that hold them."""


class Threads:
    """An executor without a queue, so that a limit on a call's time can begin with the call."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="tools")
        self._free = asyncio.Semaphore(MAX_THREADS)
        self._held = Counter[str]()

    async def start(self, name: str, call: Callable[[], Any], wait_s: float) -> "asyncio.Future[Any]":
        """Call a tool in a free thread, which is taken until it returns. Raises NoThread: none within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._free.acquire()
        except TimeoutError as error:
            held = ", ".join(f"{count} of {tool}" for tool, count in self._held.most_common() if count)
            raise NoThread(
                f"{name} waited {wait_s:g} s for one of {MAX_THREADS} threads: calls that have not returned hold them"
                f" ({held})"
            ) from error
        self._held[name] += 1

        def ended(running: "asyncio.Future[Any]") -> None:
            self._held[name] -= 1
            self._free.release()
            if not running.cancelled():
                running.exception()  # of a call that was given up, nothing else asks for it

        running = asyncio.get_running_loop().run_in_executor(self._executor, copy_context().run, call)
        running.add_done_callback(ended)
        return asyncio.shield(running)


def prepare(options: Mapping[str, Any]) -> None:
    """Load the tools. Raises EnvironmentFailed: an option or a tool cannot be used."""
    if strange := sorted(set(options) - OPTIONS):
        raise EnvironmentFailed(f"environment.function.tools.{strange[0]}: unknown; it has {sorted(OPTIONS)}")
    _tools.clear()
    _threads[:] = [Threads()]
    allowed = options.get("allow_unisolated", False) is True
    tools = options.get("tools") or ["calculator"]
    _tools.update(load_tools([tools] if isinstance(tools, str) else tools, allow_unisolated=allowed))


async def rollout(row: dict[str, Any], client: Client) -> Trajectory:
    """One conversation with tools; reward.function judges its last answer."""
    messages = [{"role": "system", "content": client.options["system"]}] if "system" in client.options else []
    prompt = row["prompt"]
    messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    tools = [tool.schema for tool in _tools.values()]
    counts = {"episode/tool_calls": 0.0, "episode/tool_errors": 0.0}
    while True:
        try:
            turn = await client.generate(messages, tools=tools)
        except EpisodeOver as over:
            if not counts["episode/tool_calls"]:
                raise
            return Trajectory(metrics={**counts, f"episode/{type(over).__name__}": 1.0})
        calls = turn.message.get("tool_calls")
        if not calls or turn.finish_reason == "length":
            return Trajectory(metrics=counts)
        said = await asyncio.gather(*(use(call, client) for call in calls))
        counts["episode/tool_calls"] += len(calls)
        counts["episode/tool_errors"] += sum(failed for _, failed in said)
        names = [(call["id"], call["function"]["name"]) for call in calls]
        results = [
            {"role": "tool", "tool_call_id": number, "name": name, "content": text}
            for (number, name), (text, _) in zip(names, said, strict=True)
        ]
        messages = [*messages, turn.message, *results]


async def use(call: Mapping[str, Any], client: Client) -> tuple[str, bool]:
    """What a tool says to a call, and whether it has failed. Never raises for what the policy has written.

    Raises NoThread: other calls hold all threads, and do not return.
    """
    name, arguments, options = call["function"]["name"], call["function"]["arguments"], client.options
    most, limit_s = int(options.get("max_tool_chars", 4096)), float(options.get("tool_timeout_s", 20.0))
    if (tool := _tools.get(name)) is None:
        known = ", ".join(_tools)
        return (f"error: no tool {name!r}; there are {known}" if name else "error: the call is no JSON"), True
    try:
        values = json.loads(arguments) if arguments.strip() else {}
        if not isinstance(values, dict):
            return "error: the arguments are no JSON object", True
        if tool.in_thread:
            running = await _threads[0].start(name, partial(tool.call, **values), WAIT * client.turn_timeout_s)
        else:
            running = tool.call(**values)
        async with asyncio.timeout(limit_s):  # from its start on
            return sendable(str(await running)[:most]), False
    except NoThread:
        raise
    except TimeoutError:
        return f"error: {name} took longer than {limit_s:g} s", True
    except Exception as error:  # noqa: BLE001 - whatever a tool raises is its answer
        return sendable(f"error: {type(error).__name__}: {error}"[:most]), True
