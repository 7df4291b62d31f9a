"""The OpenAI-compatible server of an environment process, on the loopback interface, with a key for each episode.

It never touches the loop that serves the engine: that is another process, which gets turns (environments/client.py).
aiohttp (Apache-2.0, extra `agents`) reads HTTP, bounds bodies and headers, and cancels a request whose client has gone,
which aborts its turn.
"""

import asyncio
import hmac
import itertools
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from aiohttp import web

from rollout_server.tasks.agents.answers import stream, whole
from rollout_server.tasks.agents.requests import MAX_BODY_BYTES, Asked, Refused, Rules, read
from rollout_server.tasks.environments import ContextFull, EpisodeOver, NoMoreTurns, Turn
from rollout_server.tasks.environments.client import Client

SESSION = "X-Session-ID"
"""Header in which a relay says for which session it asks."""
HOST = "127.0.0.1"
"""No key of the configuration binds another address."""
MAX_REQUESTS = 64
"""Of one episode at once; further ones get 429, upon which clients try again."""
LINGER_S = 1.0
"""For a client to read why its body was not read."""
CODES: dict[type[EpisodeOver], str] = {ContextFull: "context_length_exceeded", NoMoreTurns: "max_turns_exceeded"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, eq=False)
class Access:
    """One episode's part of the endpoint, until `close`."""

    client: Client
    base_url: str
    number: int
    session: str = ""
    over: EpisodeOver | None = None
    """What has ended the episode, where a request was refused for it."""
    turns: list[int] = field(default_factory=list)
    """Numbers of the turns that were answered."""
    running: set["asyncio.Task[object]"] = field(default_factory=set)
    api_key: str = ""
    """The key that stands for the episode."""

    def __post_init__(self) -> None:
        self.api_key = f"slipstream-{self.number}-{secrets.token_urlsafe(32)}"


class Endpoint:
    """Answers /v1/models, /v1/chat/completions and /v1/completions."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._episodes: dict[str, Access] = {}
        self._sessions: dict[str, Access] = {}
        self.relay_key = secrets.token_urlsafe(32)
        """For a relay in this process, which names the session of each request (SESSION)."""
        self._numbers, self._answers = itertools.count(), itertools.count()
        self.url = ""
        """Its address, with /v1."""

    async def start(self) -> None:
        """Listen on a free port."""
        app = web.Application(middlewares=[self._errors], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.post("/v1/chat/completions", partial(self._answer, is_chat=True)),
                web.post("/v1/completions", partial(self._answer, is_chat=False)),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, lingering_time=LINGER_S)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        self.url = f"http://{HOST}:{runner.addresses[0][1]}/v1"

    def open(self, client: Client, session: str = "") -> Access:
        """Admit an episode, or a session of one, which a relay names."""
        access = Access(client, self.url, next(self._numbers), session)
        self._episodes[str(access.number)] = access
        if session:
            self._sessions[session] = access
        return access

    def close(self, access: Access) -> None:
        """Refuse the episode's key from now on, and end the requests that still run."""
        del self._episodes[str(access.number)]
        self._sessions.pop(access.session, None)
        for task in access.running:
            task.cancel()

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every answer that is an error has OpenAI's form."""
        try:
            return await handler(request)
        except Refused as error:
            refused = error
        except web.HTTPRequestEntityTooLarge:
            refused = Refused(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="request_too_large")
        except web.HTTPException as error:
            refused = Refused(
                error.status, f"{request.method} {request.path[:200]}: {error.reason}", code="unknown_url"
            )
        return web.json_response(refused.body(), status=refused.status)

    def _admitted(self, request: web.Request) -> Access:
        """The episode of a request's key. Raises Refused: 401."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else ""
        if _same(key, self.relay_key):
            if (named := self._sessions.get(request.headers.get(SESSION, ""))) is not None:
                return named
            raise Refused(401, f"{SESSION} names no session that runs", code="invalid_api_key")
        access = self._episodes.get(key.removeprefix("slipstream-").partition("-")[0])
        if access is not None and _same(key, access.api_key):
            return access
        raise Refused(401, "the key is not that of an episode that runs", code="invalid_api_key")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._admitted(request)
        return web.json_response({"object": "list", "data": [_described(name) for name in self._rules.models]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._admitted(request)
        self._rules.check_model(request.match_info["model"])
        return web.json_response(_described(request.match_info["model"]))

    async def _answer(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        access = self._admitted(request)  # before the body is read
        if len(access.running) >= MAX_REQUESTS:
            raise Refused(429, f"the episode has {MAX_REQUESTS} requests at once", code="rate_limit_exceeded")
        task = asyncio.current_task()
        assert task is not None
        access.running.add(task)
        try:
            asked = read(await request.read(), self._rules, is_chat=is_chat)
            turns = await _turns(access, asked)
            pieces = [await access.client.pieces(turn.token_ids) if asked.logprobs else [] for turn in turns]
            name = f"{'chatcmpl' if is_chat else 'cmpl'}-{access.number}-{next(self._answers)}"
            if not asked.stream:
                return web.json_response(whole(name, asked, turns, pieces, is_chat=is_chat))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            await response.prepare(request)
            for event in stream(name, asked, turns, pieces, is_chat=is_chat):
                await response.write(event)
            await response.write_eof()
            return response
        finally:
            access.running.discard(task)


async def _turns(access: Access, asked: Asked) -> list[Turn]:
    """The choices of an answer, a turn of the episode each. Raises Refused."""
    generate, limit = access.client.generate, asked.max_new_tokens
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(generate(asked.context, tools=asked.tools, max_new_tokens=limit))
                for _ in range(asked.n)
            ]
    except ExceptionGroup as failed:
        error = failed.exceptions[0]
        if isinstance(error, EpisodeOver):
            access.over = error
            raise Refused(400, str(error), code=CODES[type(error)], param="messages") from error
        if isinstance(error, ValueError | OverflowError):  # the chat template's, or what no frame can carry
            raise Refused(400, str(error), param="messages") from error
        raise
    turns = [task.result() for task in tasks]
    access.turns += [turn.number for turn in turns]
    return turns


def _described(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "slipstream"}


def _same(key: str, wanted: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(key.encode("utf-8", "surrogateescape"), wanted.encode())
