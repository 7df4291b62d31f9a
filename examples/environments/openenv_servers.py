"""Environments behind a server of OpenEnv's protocol (0.10; extra `openenv`).

`environment.function: examples/environments/openenv_servers.py:rollout`


options  url: of a server, http://10.0.0.7:8000, or a list of them, over which prompts are spread
         action: field of an action that gets the answer's text (default: the only text field that it must have);
                 `json`: the answer itself is the JSON object of an action
         fields: further fields of every action, for example {timeout_s: 5}
         observation: field of an observation that is shown (default: its only text field, else all of it as JSON)
         reset: further arguments of reset
         reward: sum (default) of all steps, or last
         style: `chat` (default: an observation is a message of the user) or `text` (for models without chat template)
         max_turn_tokens: of one answer (default: what is left)
         wait_s: for a place at a server that has none free, and for each of its answers (default 60)

A server that gives no session is passed over: its episodes are played at the next one of the list.

An episode is a session over a WebSocket: reset, then a step for each answer until the server says done. All episodes of
a prompt have one seed, that of the prompt or the row's own `seed`. The package openenv itself is not needed: its client
brings a web interface and pins that engines do not go with. The protocol is that of openenv/core/env_server/types.py.
"""

import asyncio
import json
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from textarena_games import STYLES, after, begun  # beside this file

from rollout_server.tasks.environments import EnvironmentFailed, EpisodeOver, Trajectory
from rollout_server.tasks.environments.client import Client
from rollout_server.tasks.environments.protocol import MAX_BYTES, shown

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse

KEY = "environment.function.*"
OPTIONS = {"url", "action", "fields", "observation", "reset", "reward", "style", "max_turn_tokens", "wait_s"}
WAIT_S = 60.0
SCHEMA_S = 10.0
PAUSE_S = 0.2
"""Before asking again for a place."""
CLOSE_S = 1.0
"""For a server to answer that a session is closed."""
FULL = "CAPACITY_REACHED"
OWN = ("metadata", "done", "reward")
"""Fields of every action or observation."""
_action: list[str] = []
_named: set[str] = set()
"""Servers without an answer that stderr has named, each with its error."""
Ask = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Sends a message of this kind with this data; returns the checked observation, reward and done."""


class ServerFailed(RuntimeError):
    """A server refuses, is gone, or breaks the protocol; the message says what it said."""


class _Full(ServerFailed):
    """No session is free."""


def prepare(options: Mapping[str, Any]) -> None:
    """Ask the first server for its actions. Raises EnvironmentFailed: no answer, or no text goes into an action."""
    if strange := sorted(set(options) - OPTIONS):
        raise EnvironmentFailed(f"{KEY}.{strange[0]}: unknown; openenv's have {sorted(OPTIONS)}")
    for name, allowed in (("style", STYLES), ("reward", ("sum", "last"))):
        if options.get(name, allowed[0]) not in allowed:
            raise EnvironmentFailed(f"{KEY}.{name}: {options[name]!r}; take one of {allowed}")
    try:
        import aiohttp  # noqa: F401
    except ModuleNotFoundError as error:
        raise EnvironmentFailed(
            f"openenv_servers.py needs a package ({error}): pip install 'slipstream-rl[openenv]'"
        ) from error
    _action[:] = [str(options["action"])] if "action" in options else [text_field(_schema(urls(options)[0]))]


def urls(options: Mapping[str, Any]) -> list[str]:
    """The servers. Raises EnvironmentFailed."""
    given = options.get("url")
    found: list[str] = []
    for one in given if isinstance(given, list) else [given]:
        parts = urlsplit(one) if isinstance(one, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
            raise EnvironmentFailed(f"{KEY}.url: {shown(one)}; give the address of a server, http://10.0.0.7:8000")
        found.append(str(one).rstrip("/"))
    if not found:
        raise EnvironmentFailed(f"{KEY}.url: an empty list; give the address of a server, http://10.0.0.7:8000")
    return found


def _schema(url: str) -> Any:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/schema", timeout=SCHEMA_S) as answer:
            return json.loads(answer.read(MAX_BYTES))
    except (OSError, ValueError) as error:
        raise EnvironmentFailed(
            f"{KEY}.url: {url}/schema does not say what actions are ({error}); start the server first, or correct it"
        ) from error


def text_field(schema: Any) -> str:
    """The one field of an action that has to be given as text. Raises EnvironmentFailed."""
    action = schema.get("action") if isinstance(schema, Mapping) else None
    fields = action.get("properties") if isinstance(action, Mapping) else None
    fields = {name: one for name, one in fields.items() if name not in OWN} if isinstance(fields, Mapping) else {}
    texts = [name for name, one in fields.items() if isinstance(one, Mapping) and one.get("type") == "string"]
    needed = [name for name in texts if name in (action or {}).get("required", ())] or texts
    if len(needed) != 1:
        raise EnvironmentFailed(
            f"{KEY}.action: an action of this server has the fields {', '.join(fields) or 'none'}; name the one that"
            " gets the answer's text, or take `json`"
        )
    return str(needed[0])


async def rollout(row: dict[str, Any], client: Client) -> Trajectory:
    """One session. Raises ServerFailed."""
    options = client.options
    servers, seed = urls(options), int(row["columns"].get("seed", client.prompt_seed))
    wait_s = float(options.get("wait_s", WAIT_S))
    context: Any = [] if options.get("style", "chat") == "chat" else ""
    rewards: list[float] = []
    steps, bad, done = 0, 0, False
    first = client.prompt_seed % len(servers)
    async with _session([*servers[first:], *servers[:first]], wait_s) as ask:
        said = await ask("reset", {"seed": seed % 2**31, **dict(options.get("reset") or {})})
        told = begun(row["prompt"], observed(said, options))
        done = said["done"]
        while not done:
            try:
                turn = await client.generate(after(context, told), max_new_tokens=options.get("max_turn_tokens"))
            except EpisodeOver:  # the context is full for good: what was reached counts
                break
            context = after(context, told)
            context = context + turn.text if isinstance(context, str) else [*context, turn.message]
            action = action_of(turn.text, options)
            if action is None:
                bad, told = bad + 1, "error: the answer is no JSON object"
                continue
            said = await ask("step", action)
            steps, done, told = steps + 1, said["done"], observed(said, options)
            rewards.append(said["reward"])
    reward = (rewards[-1] if rewards else 0.0) if options.get("reward") == "last" else sum(rewards)
    metrics = {"episode/moves": float(steps), "episode/finished": float(done), "episode/invalid_move": float(bad)}
    return Trajectory(reward=reward, metrics=metrics)


def action_of(text: str, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The action of an answer; None for one that is no JSON object where it has to be."""
    more = dict(options.get("fields") or {})
    (name,) = _action
    if name != "json":
        return {**more, name: text}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return {**more, **found} if isinstance(found, dict) else None


def observed(said: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """What of an observation the policy is shown. Raises ServerFailed: it has no such field."""
    fields = {name: value for name, value in said["observation"].items() if name not in OWN}
    if "observation" in options:
        if options["observation"] not in fields:
            raise ServerFailed(f"{KEY}.observation: {options['observation']!r}; there are {', '.join(fields)}")
        value = fields[options["observation"]]
        return value if isinstance(value, str) else json.dumps(value)
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(texts) == 1 else json.dumps(fields)


@asynccontextmanager
async def _session(servers: Sequence[str], wait_s: float) -> AsyncIterator[Ask]:
    """A session at the first of these servers that gives one; waits for a place until `wait_s` are over.

    Raises ServerFailed.
    """
    import aiohttp

    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    async with aiohttp.ClientSession(trust_env=False) as http:
        url, socket = await _connected(http, servers, until)

        async def ask(kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal socket
            while True:
                try:
                    return await _asked(socket, url, kind, data, wait_s)
                except _Full:
                    await _close(socket)
                    if kind != "reset" or loop.time() + PAUSE_S > until:
                        raise
                    await asyncio.sleep(PAUSE_S)
                    _, socket = await _connected(http, [url], loop.time() + wait_s)

        try:
            yield ask
            with suppress(aiohttp.ClientError, ConnectionError):  # it may hang up once it is done: the episode counts
                await socket.send_json({"type": "close"})
        finally:
            await _close(socket)


async def _close(socket: "ClientWebSocketResponse") -> None:
    with suppress(TimeoutError):  # then it is closed on this side alone
        async with asyncio.timeout(CLOSE_S):
            await socket.close()


async def _connected(
    http: "ClientSession", servers: Sequence[str], until: float
) -> tuple[str, "ClientWebSocketResponse"]:
    """The first of the servers that answers before `until`, and a socket to it. Raises ServerFailed: none does."""
    import aiohttp

    loop, refused = asyncio.get_running_loop(), []
    for at, url in enumerate(servers):
        share_s = max(0.0, until - loop.time()) / (len(servers) - at)
        try:
            async with asyncio.timeout(share_s):
                socket = await http.ws_connect(f"{url}/ws", max_msg_size=MAX_BYTES, heartbeat=20.0)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            refused.append(f"{url}: no session ({type(error).__name__}: {error})")
            continue
        for gone in [one for one in refused if one not in _named]:
            _named.add(gone)
            sys.stderr.write(f"openenv: {gone}; its episodes are played at {url}\n")
        return url, socket
    raise ServerFailed("; ".join(refused))


async def _asked(
    socket: "ClientWebSocketResponse", url: str, kind: str, data: Mapping[str, Any], wait_s: float
) -> dict[str, Any]:
    """The checked answer to a message. Raises ServerFailed."""
    import aiohttp

    try:
        async with asyncio.timeout(wait_s):
            if not socket.closed:
                await socket.send_json({"type": kind, "data": data})
            message = await socket.receive()
    except TimeoutError as error:
        raise ServerFailed(f"{url}: no answer to {kind} within {wait_s:g} s ({KEY}.wait_s)") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ServerFailed(f"{url}: {kind} could not be sent: {error}") from error
    if message.type is not aiohttp.WSMsgType.TEXT:
        raise ServerFailed(f"{url}: the session ended at {kind} ({message.type.name} {shown(message.data)})")
    try:
        answer = json.loads(message.data)
    except ValueError as error:
        raise ServerFailed(f"{url}: the answer to {kind} is no JSON: {shown(message.data)}") from error
    found = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(found, dict):
        raise ServerFailed(f"{url}: the answer to {kind} is {shown(answer)}; expected a type and data")
    if answer.get("type") == "error":
        failed = _Full if found.get("code") == FULL else ServerFailed
        raise failed(f"{url}: {kind}: {found.get('code')}: {shown(found.get('message'))}")
    reward, done = found.get("reward"), found.get("done")
    reward = 0.0 if reward is None else reward
    if (
        not isinstance(found.get("observation"), dict)
        or not isinstance(done, bool)
        or not isinstance(reward, bool | int | float)
    ):
        raise ServerFailed(f"{url}: the answer to {kind} is {shown(found)}; expected observation, reward and done")
    return {"observation": found["observation"], "reward": float(reward), "done": done}
