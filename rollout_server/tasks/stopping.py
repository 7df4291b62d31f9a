"""Stop strings, and the text of answers that still run. Engines know tokens alone, so their text is read here.

Trained are the sampled ids up to the token that completes a stop string, that token whole: it was sampled, and ending
there was the policy's choice. The answer's text ends before the string.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_server.engines.base import Completion, Engine

LOOK_S = 0.05
"""Between two looks at the tokens of a running answer."""
BYTES = 4
"""Most tokens that a character takes, where each of its bytes is one."""
PART = "\ufffd"
"""The end of a text whose last character is not whole yet."""
Decode = Callable[[Sequence[int]], str]
Beside = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Stop:
    """Where an answer ends."""

    num_tokens: int
    """That are kept, the one included that completes the string."""
    text: str
    """Before the string."""


def first_stop(decode: Decode, token_ids: Sequence[int], stops: Sequence[str]) -> Stop | None:
    """The first stop string in the text of an answer; None where there is none."""
    if not stops or _place(decode(token_ids), stops) < 0:
        return None
    low, high = 1, len(token_ids)
    while low < high:  # the shortest beginning of which the text has one
        middle = (low + high) // 2
        low, high = (low, middle) if _place(decode(token_ids[:middle]), stops) >= 0 else (middle + 1, high)
    text = decode(token_ids[:low])
    return Stop(low, text[: _place(text, stops)])


def whole_tokens(decode: Decode, token_ids: Sequence[int], text: str) -> int | None:
    """How many of the tokens have exactly this text; None where it ends within a token."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(decode(token_ids[:middle])) >= len(text) else (middle + 1, high)
    return low if decode(token_ids[:low]) == text else None


def shown_of(text: str, stops: Sequence[str]) -> str:
    """What of a running answer's text stays as it is: no part of a character, and no beginning of a stop string."""
    text = text.rstrip(PART)
    held = (size for stop in stops for size in range(len(stop) - 1, 0, -1) if text.endswith(stop[:size]))
    return text[: len(text) - max(held, default=0)]


def _place(text: str, stops: Sequence[str]) -> int:
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=-1)


@dataclass(slots=True)
class _Seen:
    """What has been seen of a running answer, and its text, decoded from where the last whole character ended."""

    ids: list[int] = field(default_factory=list)
    is_over: bool = False
    _text: str = ""
    _last: int = 0
    """Tokens before the piece that was read last: a piece is decoded behind another, as spaces depend on it."""
    _read: int = 0

    def read(self, decode: Decode) -> str:
        """The text of all tokens."""
        before, both = decode(self.ids[self._last : self._read]), decode(self.ids[self._last :])
        text = self._text + both[len(before) :]
        if not both.endswith(PART):
            self._text, self._last, self._read = text, self._read, len(self.ids)
        return text


async def until_stopped(
    engine: Engine,
    generating: Coroutine[Any, Any, list[Completion]],
    request_id: str,
    *,
    decode: Decode,
    beside: Beside,
    stops: Sequence[str] = (),
    told: Callable[[str], None] | None = None,
) -> list[Completion]:
    """Answers that end at the first of their stop strings; the request ends when all of its answers have.

    Args:
        engine, generating, request_id: what samples them.
        decode, beside: text of token ids, and what runs that in the tokenizer's thread.
        stops: strings that end an answer.
        told: gets the text of the only answer, as far as it stays as it is, whenever there is more.
    """
    running = asyncio.create_task(generating)
    seen: list[_Seen] = []
    keep = BYTES * max(map(len, stops), default=0)
    try:
        while (stops or told) and not (await asyncio.wait([running], timeout=LOOK_S))[0]:
            for number, part in enumerate(engine.progress(request_id, [len(one.ids) for one in seen])):
                if number == len(seen):
                    seen.append(_Seen())
                one, new = seen[number], part.token_ids.tolist()
                one.ids += new
                if one.is_over or not new:
                    continue
                tail = one.ids[-len(new) - keep :]
                if stops and _place(await beside(decode, tail), stops) >= 0:
                    one.is_over = await beside(first_stop, decode, one.ids, stops) is not None
                else:
                    one.is_over = part.finish_reason is not None
                if told is not None and not one.is_over:
                    told(shown_of(await beside(one.read, decode), stops))
            if seen and all(one.is_over for one in seen):
                engine.abort(request_id)
                break
        answers = await running
    finally:
        running.cancel()
    return [await beside(_cut, decode, answer, stops) for answer in answers] if stops else answers


def _cut(decode: Decode, answer: Completion, stops: Sequence[str]) -> Completion:
    if (stop := first_stop(decode, answer.token_ids.tolist(), stops)) is None:
        return answer
    return answer.first(stop.num_tokens)
