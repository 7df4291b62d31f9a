"""The OpenAI-compatible server of an environment process, on the loopback interface, with a key for each episode.

It never touches the loop that serves the engine: that is another process, which gets turns (environments/client.py).
aiohttp (Apache-2.0, extra `agents`) reads HTTP, bounds bodies and headers, and cancels a request whose client has gone,
which aborts its turn.
"""

import asyncio
import hashlib
import hmac
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from aiohttp import web

from rollout_server.tasks.agents.answers import STREAMS, message_of, whole
from rollout_server.tasks.agents.requests import MAX_BODY_BYTES, ApiError, Form, Rules, SamplingRequest, read
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
RETRY_S = 3.0
"""A request whose client has gone goes on for so long: the client may ask again, which is the same turn."""
RETRIED = "X-Stainless-Retry-Count"
"""Header of OpenAI's clients: above 0 in a request that they send again."""
PREFIXES: dict[Form, str] = {"chat": "chatcmpl", "text": "cmpl", "responses": "resp"}
log = logging.getLogger(__name__)
CODES: dict[type[EpisodeOver], str] = {ContextFull: "context_length_exceeded", NoMoreTurns: "max_turns_exceeded"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, eq=False)
class Pending:
    """The turns of a request, which a client that asks again gets too."""

    key: bytes
    """Digest of the request."""
    turns: "asyncio.Task[list[Turn]]" = field(init=False)
    text: str = ""
    """Of the only turn, so far."""
    grew: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is more text, and when all is there."""
    waiting: int = 0
    """Requests that wait for it."""
    given_up: asyncio.TimerHandle | None = None

    def tell(self, text: str) -> None:
        """Take in the text so far."""
        self.text = text
        self.grew.set()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended without turns."""
        return self.turns.done() and (self.turns.cancelled() or self.turns.exception() is not None)


@dataclass(slots=True, eq=False)
class Access:
    """One episode's part of the endpoint, until `close`."""

    client: Client
    base_url: str
    number: int
    api_key: str
    """The key that stands for the episode."""
    session: str = ""
    over: EpisodeOver | None = None
    """What has ended the episode, where a request was refused for it."""
    turns: list[int] = field(default_factory=list)
    """Numbers of the turns that were answered."""
    running: set["asyncio.Task[object]"] = field(default_factory=set)
    pending: list[Pending] = field(default_factory=list)
    """Turns that are sampled, or whose answer has not been received."""
    responses: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Conversations by the id of the response that ended them, for previous_response_id."""

    def ask(self, asked: SamplingRequest, key: bytes, *, is_retried: bool) -> Pending:
        """The turns of a request: those of one before it with the same body whose client has gone, or new ones."""
        for found in self.pending:
            if found.key == key and (is_retried or not found.waiting) and not found.has_failed:
                if found.given_up is not None:
                    found.given_up.cancel()
                return found
        fresh = Pending(key)
        told = fresh.tell if asked.stream and asked.n == 1 else None
        fresh.turns = asyncio.create_task(self._sampled(asked, told))
        fresh.turns.add_done_callback(lambda _: fresh.grew.set())
        self.pending.append(fresh)
        return fresh

    def leave(self, pending: Pending) -> None:
        """Call turns off that no client waits for, unless one asks for them again in time."""
        if pending in self.pending and not pending.waiting:
            wait_s = 0.0 if pending.has_failed else RETRY_S
            pending.given_up = asyncio.get_running_loop().call_later(wait_s, self.drop, pending)

    def drop(self, pending: Pending) -> None:
        """Forget turns: they were received, or nothing asks for them any more."""
        pending.turns.cancel()
        if pending in self.pending:
            self.pending.remove(pending)

    def remember(self, name: str, asked: SamplingRequest, turns: list[Turn]) -> None:
        """For requests that name this response as the one before them."""
        if asked.form == "responses" and isinstance(asked.context, list):
            said = {key: value for key, value in message_of(turns[0], asked).items() if key != "reasoning_content"}
            self.responses[name] = [*asked.context, {**said, "content": said["content"] or ""}]

    async def _sampled(self, asked: SamplingRequest, told: Callable[[str], None] | None) -> list[Turn]:
        """The choices of an answer, a turn of the episode each. Raises ApiError."""
        given: dict[str, Any] = {name: getattr(asked, name) for name in ("tools", "max_new_tokens", "stop", "begins")}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.client.generate(asked.context, told=told, **given)) for _ in range(asked.n)
                ]
        except ExceptionGroup as failed:
            error = failed.exceptions[0]
            if isinstance(error, EpisodeOver):
                self.over = error
                raise ApiError(400, str(error), code=CODES[type(error)], param="messages") from error
            if isinstance(error, ValueError | OverflowError):  # the chat template's, or what no frame can carry
                raise ApiError(400, str(error), param="messages") from error
            raise
        turns = [task.result() for task in tasks]
        self.turns += [turn.number for turn in turns]
        return turns


class OpenAIEndpoint:
    """Answers /v1/models, /v1/chat/completions, /v1/completions and /v1/responses."""

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
                web.post("/v1/chat/completions", partial(self._answer, form="chat")),
                web.post("/v1/completions", partial(self._answer, form="text")),
                web.post("/v1/responses", partial(self._answer, form="responses")),
            ]
        )
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, lingering_time=LINGER_S)
        await runner.setup()
        await web.TCPSite(runner, HOST, 0).start()
        self.url = f"http://{HOST}:{runner.addresses[0][1]}/v1"

    def open(self, client: Client, session: str = "") -> Access:
        """Admit an episode, or a session of one, which a relay names."""
        number = next(self._numbers)
        access = Access(client, self.url, number, f"slipstream-{number}-{secrets.token_urlsafe(32)}", session)
        self._episodes[str(access.number)] = access
        if session:
            self._sessions[session] = access
        return access

    def close(self, access: Access) -> None:
        """Refuse the episode's key from now on, and end the requests that still run."""
        del self._episodes[str(access.number)]
        self._sessions.pop(access.session, None)
        for task in (*access.running, *(pending.turns for pending in access.pending)):
            task.cancel()

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every answer that is an error has OpenAI's form."""
        try:
            return await handler(request)
        except ApiError as error:
            refused = error
        except web.HTTPRequestEntityTooLarge:
            refused = ApiError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="request_too_large")
        except web.HTTPException as error:
            refused = ApiError(
                error.status, f"{request.method} {request.path[:200]}: {error.reason}", code="unknown_url"
            )
        except Exception as error:  # a client of OpenAI's reads JSON; the log has the stack
            log.exception("%s %s failed", request.method, request.path[:200])
            refused = ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")
        return web.json_response(refused.body(), status=refused.status)

    def _admitted(self, request: web.Request) -> Access:
        """The episode of a request's key. Raises ApiError: 401."""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else ""
        if _same(key, self.relay_key):
            if (named := self._sessions.get(request.headers.get(SESSION, ""))) is not None:
                return named
            raise ApiError(401, f"{SESSION} names no session that runs", code="invalid_api_key")
        access = self._episodes.get(key.removeprefix("slipstream-").partition("-")[0])
        if access is not None and _same(key, access.api_key):
            return access
        raise ApiError(401, "the key is not that of an episode that runs", code="invalid_api_key")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._admitted(request)
        return web.json_response({"object": "list", "data": [_described(name) for name in self._rules.models]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._admitted(request)
        self._rules.check_model(request.match_info["model"])
        return web.json_response(_described(request.match_info["model"]))

    async def _answer(self, request: web.Request, *, form: Form) -> web.StreamResponse:
        access = self._admitted(request)  # before the body is read
        if len(access.running) >= MAX_REQUESTS:
            raise ApiError(429, f"the episode has {MAX_REQUESTS} requests at once", code="rate_limit_exceeded")
        task = asyncio.current_task()
        assert task is not None
        access.running.add(task)
        try:
            body = await request.read()
            asked = read(body, self._rules, form, access.responses)
            key = hashlib.blake2b(form.encode() + body, digest_size=16).digest()
            pending = access.ask(asked, key, is_retried=request.headers.get(RETRIED, "0") != "0")
            name = f"{PREFIXES[form]}-{access.number}-{next(self._answers)}"
            pending.waiting += 1
            try:
                send = self._streamed if asked.stream else self._whole
                response = await send(request, access, pending, asked, name)
                access.drop(pending)
                return response
            finally:
                pending.waiting -= 1
                access.leave(pending)
        finally:
            access.running.discard(task)

    async def _whole(
        self, request: web.Request, access: Access, pending: Pending, asked: SamplingRequest, name: str
    ) -> web.StreamResponse:
        turns, pieces = await self._ended(access, pending, asked, name)
        response = web.json_response(whole(name, asked, turns, pieces))
        await response.prepare(request)
        await response.write_eof()
        return response

    async def _streamed(
        self, request: web.Request, access: Access, pending: Pending, asked: SamplingRequest, name: str
    ) -> web.StreamResponse:
        """Text as it comes. Where a turn fails before any, its status says so; after that, an event."""
        stream = STREAMS[asked.form](name, asked)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def send(events: Iterable[bytes]) -> None:
            for event in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(event)

        while not pending.turns.done():
            await pending.grew.wait()
            pending.grew.clear()
            if pending.text and not pending.turns.done():
                await send(stream.grown(pending.text))
        try:
            turns, pieces = await self._ended(access, pending, asked, name)
        except ApiError as refused:
            if not response.prepared:
                raise
            await send([stream.failed(refused.body())])
        else:
            await send(stream.ended(turns, pieces))
        await response.write_eof()
        return response

    async def _ended(
        self, access: Access, pending: Pending, asked: SamplingRequest, name: str
    ) -> tuple[list[Turn], list[list[str]]]:
        """The turns of a request, and the texts of their tokens where logprobs are asked for. Raises ApiError."""
        turns = await asyncio.shield(pending.turns)
        access.remember(name, asked, turns)
        return turns, [await access.client.pieces(turn.token_ids) if asked.logprobs else [] for turn in turns]


def _described(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "slipstream"}


def _same(key: str, wanted: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(key.encode("utf-8", "surrogateescape"), wanted.encode())
