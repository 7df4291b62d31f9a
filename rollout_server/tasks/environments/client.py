"""What an environment's function asks for turns, within its process."""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_server.tasks.environments import Turn
from rollout_server.tasks.environments.protocol import OVER

Send = Callable[[list[Any]], None]


@dataclass(slots=True, eq=False)
class Client:
    """The engine, for one episode. Several turns may be asked for at once."""

    seed: int
    """The episode's own: for what it draws by itself."""
    prompt_seed: int
    """That of all episodes of the prompt: for the task that they have in common, such as the state of a game."""
    options: Mapping[str, Any]
    """Options of environment.function."""
    temperature: float
    """rollout.temperature, at which answers are sampled; an evaluation has its own."""
    turn_timeout_s: float
    """environment.turn_timeout_s: for what the function does between two turns."""
    _episode: int
    _send: Send
    _calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _told: dict[int, Callable[[str], None]] = field(default_factory=dict)
    _next: int = 0

    async def generate(
        self,
        context: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        begins: str = "",
        told: Callable[[str], None] | None = None,
    ) -> Turn:
        """Sample an answer: a turn of the episode.

        Args:
            context: everything so far: messages, text, or token ids. What begins as an earlier turn's context and
                answer goes on with those very ids; only the rest is encoded.
            tools: JSON schemas of functions, for the chat template.
            max_new_tokens: of this answer; without it, all that is left.
            stop: strings that end it; its text ends before the first, and the token that completes it is trained.
            begins: text that the answer begins with, as context: it is part of `text` and not trained.
            told: is given the answer's text so far, without `begins`, while it grows.

        A call that is cancelled aborts its request in the engine; its tokens are not recorded.

        Raises:
            ContextFull, NoMoreTurns: no turn is possible any more.
            ValueError: the engine's side refuses the context, or it cannot be sent.
        """
        arguments = {
            "context": _sendable(context),
            "tools": None if tools is None else list(tools),
            "max_new_tokens": max_new_tokens,
            "stop": list(stop),
            "begins": begins,
            "stream": told is not None,
        }
        return Turn(**await self._ask("turn", arguments, told))

    async def encode(self, text: str) -> list[int]:
        """Token ids of text as it stands, without special tokens of the tokenizer's own."""
        ids: list[int] = await self._ask("encode", text)
        return ids

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = await self._ask("decode", list(token_ids))
        return text

    async def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token by itself; U+FFFD for what is no whole character."""
        texts: list[str] = await self._ask("pieces", list(token_ids))
        return texts

    async def _ask(self, what: str, given: Any, told: Callable[[str], None] | None = None) -> Any:
        call, self._next = self._next, self._next + 1
        if told is not None:
            self._told[call] = told
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self._send(["ask", self._episode, call, what, given if what == "turn" else {"given": given}])
            return await future
        except asyncio.CancelledError:
            self._send(["leave", self._episode, call])
            raise
        finally:
            del self._calls[call]
            self._told.pop(call, None)

    def told(self, call: int, text: str) -> None:
        """The server tells the text of a turn so far."""
        if (tell := self._told.get(call)) is not None:
            tell(text)

    def answered(self, call: int, value: Any, over: str | None = None) -> None:
        """The server has answered, or refuses with `value`: `over` says whether the episode can have another turn."""
        future = self._calls.get(call)
        if future is None or future.done():
            return
        if over is None:
            future.set_result(value)
        else:
            future.set_exception(OVER.get(over, ValueError)(value))


def _sendable(context: str | Sequence[Any]) -> Any:
    """Text and messages as they are, ids as the bytes of int32. Raises ValueError: none of these."""
    if isinstance(context, str) or not context or not all(type(part) is int for part in context):
        return context if isinstance(context, str) else list(context)
    try:
        return array("i", context).tobytes()
    except OverflowError as error:
        raise ValueError(f"a context is text, token ids or messages; an id is above 2 ** 31: {error}") from error
