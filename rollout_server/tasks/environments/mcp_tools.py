"""Tools of an MCP server, through the official client (MIT; extra `mcp`).

`mcp:python server.py` starts a server for each environment process, over its standard input and output;
`mcp:http://host:port/mcp` asks one that runs. All episodes of a process share the connection; where it closes, what
is asked then fails, and the next call opens another one.
"""

import asyncio
import os
import shlex
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollout_server.tasks.environments import EnvironmentFailed
from rollout_server.tasks.environments.tool_calls import Tool

PASSED_ON = ("PYTHONPATH",)
"""Variables that a server gets beside those that the client passes on by itself, such as PATH and HOME."""
START_S = 30.0
"""For a server to start and say what it has."""


def tools_of(address: str) -> list[Tool]:
    """The tools of a server. Raises EnvironmentFailed: not installed, or it does not start."""
    where = f"environment.function.tools.tools: 'mcp:{address}'"
    try:
        import mcp  # noqa: F401
    except ModuleNotFoundError as error:
        raise EnvironmentFailed(f"{where} needs a package ({error}): pip install 'slipstream-rl[mcp]'") from error
    server = Server(address)
    try:  # on a loop of its own, since this one is just starting: episodes open their connection later
        with ThreadPoolExecutor(1) as thread:
            offered = thread.submit(asyncio.run, server.offered()).result()
    except Exception as error:  # whatever the client raises: the server cannot be used
        raise EnvironmentFailed(f"{where} does not start: {error!r}") from error
    return [Tool(one, server.caller(one["function"]["name"])) for one in offered]


class Server:
    """One MCP server; its connection is opened at the first call and kept."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._client: asyncio.Future[Any] | None = None
        self._holding: dict[asyncio.Future[Any], asyncio.Task[None]] = {}

    def connect(self) -> Any:
        """A client that is not open yet."""
        from mcp import Client, StdioServerParameters, stdio_client

        if self.address.startswith(("http://", "https://")):
            return Client(self.address)
        program, *arguments = shlex.split(self.address)
        env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return Client(stdio_client(StdioServerParameters(command=program, args=arguments, env=env)))

    async def offered(self) -> list[dict[str, Any]]:
        """Its tools in OpenAI's form."""
        async with asyncio.timeout(START_S), self.connect() as client:
            listed = (await client.list_tools()).tools
        return [
            {
                "type": "function",
                "function": {"name": one.name, "description": one.description or "", "parameters": one.input_schema},
            }
            for one in listed
        ]

    async def _hold(self, opened: "asyncio.Future[Any]") -> None:
        """Keep the connection open: what opens it must close it."""
        try:
            async with self.connect() as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - of the client; the next call tries again
            if not opened.done():
                opened.set_exception(error)
        finally:
            del self._holding[opened]
            if self._client is opened:
                self._client = None

    def caller(self, name: str) -> Callable[..., Awaitable[str]]:
        """A function that calls one of its tools. It raises RuntimeError with what a failed tool says."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        async def call(**arguments: Any) -> str:
            if self._client is None:
                self._client = fresh = asyncio.get_running_loop().create_future()
                self._holding[fresh] = asyncio.create_task(self._hold(fresh))
            opened = self._client
            client = await asyncio.shield(opened)
            try:
                result = await client.call_tool(name, arguments)
            except MCPError as error:
                if error.code == CONNECTION_CLOSED and self._client is opened:
                    sys.stderr.write(f"the MCP server {self.address!r} has hung up; the next call asks anew\n")
                    self._client = None
                    self._holding[opened].cancel()
                raise
            text = "\n".join(getattr(part, "text", "") for part in result.content)
            if result.is_error:
                raise RuntimeError(text)
            return text

        return call
