"""From messages and text to token ids, without encoding anew what the engine has produced.

Encoding a conversation again, with the answers as text, gives other ids than the engine's where several spellings have
one text ("a b" may be two tokens or three), or where the chat template changes earlier turns (reasoning that it leaves
out). So what was answered is known here by its ids, and only what comes after it is encoded.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_server.tasks.task import Task, TaskError, with_values

Message = Mapping[str, Any]
Int32 = NDArray[np.int32]
LENIENT = ("utf-8", "surrogatepass")
Context = str | bytes | Sequence[int] | Sequence[Message]
"""What a turn is asked with."""
Tools = Sequence[Mapping[str, Any]] | None
MAX_ID = 2**31
"""Ids are int32; the engine knows its vocabulary."""
KEPT = ("role", "content", "name", "tool_call_id")
MARK = "slipstream-answer"
"""With a number that nothing else there has, stands for an answer in a rendered conversation."""
PICTURE = {"type": "image"}
"""A part of a message: the next of the row's pictures, as rows have them (replay/data/pictures.py)."""
ASKED: Message = {"role": "user", "content": "?"}


Expand = Callable[[Sequence[int]], list[int]]


@dataclass(frozen=True, slots=True)
class _Known:
    """A context with its answer: what it adds to the one that it goes on from."""

    before: "_Known | None"
    ids: Int32
    num_ids: int
    """With all before it."""

    def all(self) -> list[int]:
        """Ids from the beginning on."""
        parts, one = list[Int32](), self
        while one is not None:
            parts.append(one.ids)
            one = one.before  # type: ignore[assignment]
        ids: list[int] = np.concatenate(parts[::-1]).tolist()
        return ids


class Conversation:
    """What one episode has said so far, by its exact ids."""

    def __init__(self, task: Task, expand: Expand | None = None) -> None:
        """`expand` writes out the row's pictures in ids where each has one token; without, there are none."""
        self._task, self._expand = task, expand
        self._known: dict[bytes, _Known] = {}
        """By the digest of what was said up to there, answer included."""
        self._lengths: set[int] = set()
        """Of known texts."""

    def encode(self, context: Context, tools: Tools = None) -> list[int]:
        """Ids of a context: ids as they are, else those of the longest known beginning, and the rest encoded.

        Raises TaskError: the chat template refuses the messages, or a context is none of the three, or empty.
        """
        ids: list[int] = []
        if isinstance(context, str):
            ids = self._encode_text(context)
        elif isinstance(context, bytes):  # ids, as a worker process sends them
            given = np.frombuffer(context, np.int32)
            ids = given.tolist() if given.size and given.min() >= 0 else []
        elif context and all(isinstance(part, Mapping) for part in context):
            ids = self._encode_messages(list(context), tools)  # type: ignore[arg-type]
        elif context and all(type(part) is int and 0 <= part < MAX_ID for part in context):
            ids = list(context)  # type: ignore[arg-type]
        if ids:
            return ids
        raise TaskError(
            f"a context is text, token ids or messages, of one token at least; {str(context)[:80]!r} is not"
        )

    def answered(self, context: Context, tools: Tools, ids: Sequence[int] | Int32, text: str, message: Message) -> None:
        """Remember an answer: `ids` are those of context and answer, `text` and `message` what the answer says."""
        if isinstance(context, str):
            if text:  # else the same context, sampled again, would go on behind this answer's end
                self._remember(self._known_text(context)[0], ids, _digest((context + text).encode(*LENIENT)))
                self._lengths.add(len(context + text))
        elif context and not isinstance(context, bytes) and isinstance(context[0], Mapping):
            said = _chain(tools, context)  # type: ignore[arg-type]
            before = self._known_messages(said)[0]
            # An answer with tool calls may come back as them, or as the text that has them.
            said_alone = text.partition("</think>")[2].lstrip()  # clients may leave reasoning out
            spellings = {_plain(message), _plain({"role": "assistant", "content": text})}
            if said_alone:
                spellings |= {
                    _plain({**message, "content": said_alone}),
                    _plain({"role": "assistant", "content": said_alone}),
                }
            for spelling in spellings:
                self._remember(before, ids, _digest(said[-1] + spelling.encode(*LENIENT)))

    def _remember(self, before: _Known | None, ids: Sequence[int] | Int32, key: bytes) -> None:
        start = 0 if before is None else before.num_ids
        self._known[key] = _Known(before, np.array(ids[start:], np.int32), len(ids))

    def _known_text(self, text: str) -> tuple[_Known | None, int]:
        """The longest beginning of a text that is known, and its characters."""
        for length in sorted(self._lengths, reverse=True):
            if length <= len(text) and (known := self._known.get(_digest(text[:length].encode(*LENIENT)))):
                return known, length
        return None, 0

    def _known_messages(self, said: Sequence[bytes]) -> tuple[_Known | None, int]:
        """The longest known beginning of a chain of messages, and how many of them it has."""
        for count in range(len(said) - 1, 0, -1):
            if known := self._known.get(said[count]):
                return known, count
        return None, 0

    def _encode_text(self, text: str) -> list[int]:
        known, length = self._known_text(text)
        if known is None:
            return self._task.begin(text)
        rest = text[length:]
        return known.all() + (self._task.encode_text(rest) if rest else [])

    def _encode_messages(self, messages: list[Message], tools: Tools) -> list[int]:
        known, count = self._known_messages(_chain(tools, messages))
        if known is None:
            return self._begun(messages, tools)
        rest = self._after_answer(messages[count:], tools)
        # The engine's answer ends with the token that ends a turn, unless it was cut.
        if rest and rest[0] in self._task.stop_token_ids and known.ids[-1] == rest[0]:
            rest = rest[1:]
        return known.all() + rest

    def _begun(self, messages: list[Message], tools: Tools) -> list[int]:
        """Ids of messages that begin a context, with the row's pictures where parts of them say so."""
        num = sum(_pictures(message) for message in messages)
        if num and self._expand is None:
            raise TaskError(f"the messages have {num} pictures, and the row has none: pictures are the row's own")
        ids = self._task.encode_text(self._task.render(messages, tools))  # a bos token is the template's own
        return self._expand(ids) if num and self._expand is not None else ids

    def _after_answer(self, new: Sequence[Message], tools: Tools) -> list[int]:
        """Ids of what the template puts behind an answer: the end of its turn, these messages, the next header."""
        if num := sum(map(_pictures, new)):
            raise TaskError(
                f"{num} pictures after an answer: a context shows its row's pictures before its first answer, and later"
                " turns are text"
            )
        said = "".join(map(_plain, new))
        mark = next(mark for mark in (f"{MARK}-{n}" for n in itertools.count()) if mark not in said)
        answer = {"role": "assistant", "content": mark}
        before, found, rest = self._task.render([ASKED, answer, *new], tools).rpartition(mark)
        if not found or mark in before:
            raise TaskError("model.chat_template: does not show the text of an answer once; turns cannot follow it")
        return self._task.encode_text(rest)


def _pictures(message: Message) -> int:
    """Parts of a message that are pictures of the row. Raises TaskError: a part is neither such a one nor text."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else []
    for part in parts:
        if part != PICTURE and not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
            raise TaskError(
                f"a message has the part {str(part)[:80]}; take text, or {PICTURE} for the next picture of the row"
            )
    return sum(part == PICTURE for part in parts)


def _chain(tools: Tools, messages: Sequence[Message]) -> list[bytes]:
    """Digests of a conversation up to each of its messages, that of what was offered as tools first."""
    chain = [_digest((json.dumps(list(tools), sort_keys=True) if tools else "").encode(*LENIENT))]
    for message in messages:
        chain.append(_digest(chain[-1] + _plain(message).encode(*LENIENT)))
    return chain


def _digest(said: bytes) -> bytes:
    return hashlib.blake2b(said, digest_size=16).digest()


def _plain(message: Message) -> str:
    """A message in one spelling: a client may send an answer back with other empty fields, or JSON respaced."""
    plain: dict[str, Any] = {key: message[key] for key in KEPT if message.get(key) not in (None, "")}
    functions = [(call.get("id"), call["function"]) for call in with_values(message).get("tool_calls") or []]
    plain["tool_calls"] = [[name, function.get("name"), function.get("arguments")] for name, function in functions]
    return json.dumps(plain, sort_keys=True, default=str)
