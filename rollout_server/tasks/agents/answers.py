"""Turns in the JSON of OpenAI's API, whole or in the chunks of a stream. Pure."""

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rollout_server.tasks.agents.requests import Asked
from rollout_server.tasks.environments import Turn

CHUNK_CHARS = 64
"""Text of a stream's chunk. An answer is sampled whole and sent in pieces: where it fails, its status still says so."""
DONE = b"data: [DONE]\n\n"
Pieces = Sequence[Sequence[str]]
"""Text of each token of each turn; empty where no logprobs are asked for."""


def whole(name: str, asked: Asked, turns: Sequence[Turn], pieces: Pieces, *, is_chat: bool) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choice = _chat_choice if is_chat else _text_choice
    choices = [choice(number, turn, asked, pieces[number]) for number, turn in enumerate(turns)]
    head = _head(name, asked, "chat.completion" if is_chat else "text_completion")
    return {**head, "choices": choices, "usage": _usage(turns)}


def stream(name: str, asked: Asked, turns: Sequence[Turn], pieces: Pieces, *, is_chat: bool) -> Iterator[bytes]:
    """Server-sent events of an answer, the closing one included."""
    body = whole(name, asked, turns, pieces, is_chat=is_chat)
    head = _head(name, asked, "chat.completion.chunk" if is_chat else "text_completion")
    for choice in body["choices"]:
        for part in _parts(choice):
            yield _event({**head, "choices": [part]})
    if asked.usage_in_stream:
        yield _event({**head, "choices": [], "usage": body["usage"]})
    yield DONE


def message_of(turn: Turn, asked: Asked) -> dict[str, Any]:
    """What the assistant says. Tool calls are read where tools are offered, and in answers that were not cut."""
    if asked.tools is None or "tool_calls" not in turn.message or turn.finish_reason == "length":
        return {"role": "assistant", "content": turn.text}
    return {**turn.message, "content": turn.message["content"] or None}


def _head(name: str, asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": asked.model}


def _chat_choice(number: int, turn: Turn, asked: Asked, pieces: Sequence[str]) -> dict[str, Any]:
    message = {"refusal": None, **message_of(turn, asked)}
    logprobs = _chat_logprobs(turn, pieces) if asked.logprobs else None
    reason = "tool_calls" if "tool_calls" in message else turn.finish_reason
    return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _text_choice(number: int, turn: Turn, asked: Asked, pieces: Sequence[str]) -> dict[str, Any]:
    logprobs = _text_logprobs(turn, pieces) if asked.logprobs else None
    return {"index": number, "text": turn.text, "logprobs": logprobs, "finish_reason": turn.finish_reason}


def _parts(choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A choice in pieces; all of its logprobs come with the first one."""
    index, logprobs = choice["index"], choice["logprobs"]
    is_chat = "message" in choice
    said = _deltas(choice["message"]) if is_chat else _cut(choice["text"])
    for one in said:
        yield {"index": index, "delta" if is_chat else "text": one, "logprobs": logprobs, "finish_reason": None}
        logprobs = None
    last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    yield {"index": index, **last, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for text in _cut(message["content"] or ""):
        yield {"content": text}
    for index, call in enumerate(message.get("tool_calls", ())):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        yield {"tool_calls": [{**call, "index": index, "function": {"name": name, "arguments": ""}}]}
        for text in _cut(arguments):
            yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _cut(text: str) -> Iterator[str]:
    return (text[at : at + CHUNK_CHARS] for at in range(0, len(text), CHUNK_CHARS))


def _chat_logprobs(turn: Turn, pieces: Sequence[str]) -> dict[str, Any]:
    content = [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(pieces, turn.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(turn: Turn, pieces: Sequence[str]) -> dict[str, Any]:
    ends = list(itertools.accumulate(map(len, pieces), initial=0))
    named = {"tokens": list(pieces), "token_logprobs": turn.logprobs}
    return {**named, "top_logprobs": None, "text_offset": ends[:-1]}


def _usage(turns: Sequence[Turn]) -> dict[str, int]:
    prompt, said = len(turns[0].context_ids) // 4, sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
