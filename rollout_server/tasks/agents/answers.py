"""Turns in the JSON of OpenAI's API, whole or in the chunks of a stream. Pure."""

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rollout_server.tasks.agents.requests import Asked, Form
from rollout_server.tasks.environments import Turn

DONE = b"data: [DONE]\n\n"
THINK, THOUGHT = "<think>", "</think>"
CALL, BARE = "<tool_call", ("{", "[")
"""What may begin a call: in a stream, nothing is shown from there on before the answer is whole."""
Pieces = Sequence[Sequence[str]]
"""Text of each token of each turn; empty where no logprobs are asked for."""
OBJECTS = {"chat": "chat.completion", "text": "text_completion", "responses": "response"}
Json = dict[str, Any]


def whole(name: str, asked: Asked, turns: Sequence[Turn], pieces: Pieces, form: Form) -> Json:
    """The body of an answer that is not streamed."""
    if form == "responses":
        return _response(name, asked, turns[0])
    choice = _chat_choice if form == "chat" else _text_choice
    choices = [choice(number, turn, asked, pieces[number]) for number, turn in enumerate(turns)]
    return {**_head(name, asked, OBJECTS[form]), "choices": choices, "usage": _usage(turns)}


def apart(text: str) -> tuple[str, str]:
    """(reasoning, what is said) of an answer's text, also while it grows."""
    if THOUGHT in text:
        reasoning, _, said = text.partition(THOUGHT)
        return reasoning.removeprefix(THINK).strip(), said.lstrip()
    return (text.removeprefix(THINK).lstrip(), "") if text.startswith(THINK) else ("", text)


def message_of(turn: Turn, asked: Asked) -> Json:
    """What the assistant says. Tool calls are read where tools are offered, and in answers that were not cut."""
    has_calls = asked.tools is not None and "tool_calls" in turn.message and turn.finish_reason != "length"
    reasoning, said = apart(turn.message["content"] if has_calls else turn.text)
    message: Json = {"role": "assistant", "content": (said or None) if has_calls else said}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": turn.message["tool_calls"]} if has_calls else {})


class Stream:
    """Server-sent events of one answer: text as it comes, and the rest once it is whole."""

    def __init__(self, name: str, asked: Asked, form: Form) -> None:
        self.name, self.asked, self.form = name, asked, form
        self._sent = {"reasoning_content": "", "content": ""}
        self._head = _head(name, asked, "chat.completion.chunk" if form == "chat" else OBJECTS[form])
        self._has_begun = False
        self._numbers = itertools.count()

    def grown(self, text: str) -> Iterator[bytes]:
        """Events of the text so far."""
        reasoning, said = apart(text) if self.form != "text" else ("", text)
        if self.asked.tools:
            said = _before_a_call(said)
        yield from self._more({"reasoning_content": reasoning, "content": said})

    def ended(self, turns: Sequence[Turn], pieces: Pieces) -> Iterator[bytes]:
        """Events of what is left, the closing one included."""
        body = whole(self.name, self.asked, turns, pieces, self.form)
        if self.form == "responses":
            yield from self._items(body)
            return
        for choice in body["choices"]:
            if choice["index"]:  # further choices come whole
                self._sent, self._has_begun = {"reasoning_content": "", "content": ""}, False
            message = choice["message"] if self.form == "chat" else {"content": choice["text"]}
            yield from self._more({key: message.get(key) or "" for key in self._sent}, choice["index"])
            for index, call in enumerate(message.get("tool_calls", ())):
                yield self._chunk({"tool_calls": [{**call, "index": index}]}, choice["index"])
            last: Json = {"delta": {}} if self.form == "chat" else {"text": ""}
            ending = {"index": choice["index"], **last, "logprobs": choice["logprobs"]}
            yield _event({**self._head, "choices": [{**ending, "finish_reason": choice["finish_reason"]}]})
        if self.asked.usage_in_stream:
            yield _event({**self._head, "choices": [], "usage": body["usage"]})
        yield DONE

    def failed(self, error: Json) -> bytes:
        """The event that ends a stream which has begun, and cannot go on."""
        return _event(error)

    def _more(self, texts: Json, index: int = 0) -> Iterator[bytes]:
        if not self._has_begun:
            yield from self._begun(index)
        for key, text in texts.items():
            sent = self._sent[key]
            if len(text) > len(sent) and text.startswith(sent):
                self._sent[key] = text
                if self.form != "responses":
                    yield self._chunk({key: text[len(sent) :]}, index)
                elif key == "content":
                    yield from self._text(text[len(sent) :], first=not sent)

    def _begun(self, index: int) -> Iterator[bytes]:
        self._has_begun = True
        if self.form == "chat":
            yield self._chunk({"role": "assistant", "content": ""}, index)
        elif self.form == "responses":
            started = _response(self.name, self.asked, None)
            yield self._typed("response.created", response=started)
            yield self._typed("response.in_progress", response=started)

    def _chunk(self, delta: Json, index: int) -> bytes:
        said: Json = {"delta": delta} if self.form == "chat" else {"text": delta["content"]}
        return _event({**self._head, "choices": [{"index": index, **said, "logprobs": None, "finish_reason": None}]})

    # ---- /responses ------------------------------------------------------------------------------------------

    def _text(self, delta: str, *, first: bool) -> Iterator[bytes]:
        place = {"item_id": f"msg_{self.name}", "output_index": 0, "content_index": 0}
        if first:
            item = _said(self.name, "", "in_progress")
            yield self._typed("response.output_item.added", output_index=0, item={**item, "content": []})
            yield self._typed("response.content_part.added", **place, part=item["content"][0])
        yield self._typed("response.output_text.delta", **place, delta=delta, logprobs=[])

    def _items(self, body: Json) -> Iterator[bytes]:
        said = next((item for item in body["output"] if item["type"] == "message"), None)
        yield from self._more({"reasoning_content": "", "content": said["content"][0]["text"] if said else ""})
        for index, item in enumerate(item for item in body["output"] if item["type"] != "reasoning"):
            place = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                (part,) = item["content"]
                if not part["text"]:
                    yield from self._text("", first=True)
                done = {**place, "content_index": 0}
                yield self._typed("response.output_text.done", **done, text=part["text"], logprobs=[])
                yield self._typed("response.content_part.done", **done, part=part)
            else:
                yield self._typed("response.output_item.added", output_index=index, item={**item, "arguments": ""})
                given = {"name": item["name"], "arguments": item["arguments"]}
                yield self._typed("response.function_call_arguments.delta", **place, delta=item["arguments"])
                yield self._typed("response.function_call_arguments.done", **place, **given)
            yield self._typed("response.output_item.done", output_index=index, item=item)
        kind = "completed" if body["status"] == "completed" else "incomplete"
        yield self._typed(f"response.{kind}", response=body)

    def _typed(self, kind: str, **fields: Any) -> bytes:
        said = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\n".encode() + _event(said)


def _before_a_call(text: str) -> str:
    """What of a growing text is certainly none."""
    if text.lstrip().startswith(BARE):
        return ""
    text = text.partition(CALL)[0]
    return text[: len(text) - next((size for size in range(len(CALL), 0, -1) if text.endswith(CALL[:size])), 0)]


def _response(name: str, asked: Asked, turn: Turn | None) -> Json:
    """The object of /responses; without a turn, while it is sampled."""
    output: list[Json] = []
    status, incomplete = ("completed", None) if turn is not None else ("in_progress", None)
    if turn is not None:
        message = message_of(turn, asked)
        if "reasoning_content" in message:
            text = {"type": "summary_text", "text": message["reasoning_content"]}
            output.append({"id": f"rs_{name}", "type": "reasoning", "summary": [text]})
        calls = message.get("tool_calls", ())
        if message["content"] or not calls:
            output.append(_said(name, message["content"] or "", "completed"))
        for call in calls:
            named = {"call_id": call["id"], "status": "completed", **call["function"]}
            output.append({"type": "function_call", "id": f"fc_{name}_{call['id']}", **named})
        if turn.finish_reason == "length":
            status, incomplete = "incomplete", {"reason": "max_output_tokens"}
    usage = None if turn is None else _usage([turn])
    return {
        "id": name, "object": "response", "created_at": int(time.time()), "model": asked.model, "status": status,
        "error": None, "incomplete_details": incomplete, "instructions": None, "output": output, "metadata": {},
        "parallel_tool_calls": True, "temperature": None, "top_p": None, "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in asked.tools or ()],
        "text": {"format": {"type": "text"}}, "truncation": "disabled",
        "usage": None if usage is None else {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }  # fmt: skip


def _said(name: str, text: str, status: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]}


def _head(name: str, asked: Asked, kind: str) -> Json:
    return {"id": name, "object": kind, "created": int(time.time()), "model": asked.model}


def _chat_choice(number: int, turn: Turn, asked: Asked, pieces: Sequence[str]) -> Json:
    message = {"refusal": None, **message_of(turn, asked)}
    logprobs = _chat_logprobs(turn, pieces) if asked.logprobs else None
    reason = "tool_calls" if "tool_calls" in message else turn.finish_reason
    return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason}


def _text_choice(number: int, turn: Turn, asked: Asked, pieces: Sequence[str]) -> Json:
    logprobs = _text_logprobs(turn, pieces) if asked.logprobs else None
    return {"index": number, "text": turn.text, "logprobs": logprobs, "finish_reason": turn.finish_reason}


def _chat_logprobs(turn: Turn, pieces: Sequence[str]) -> Json:
    content = [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(pieces, turn.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(turn: Turn, pieces: Sequence[str]) -> Json:
    ends = list(itertools.accumulate(map(len, pieces), initial=0))
    named = {"tokens": list(pieces), "token_logprobs": turn.logprobs}
    return {**named, "top_logprobs": None, "text_offset": ends[:-1]}


def _usage(turns: Sequence[Turn]) -> dict[str, int]:
    prompt, said = len(turns[0].context_ids) // 4, sum(len(turn.token_ids) for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}


def _event(value: Json) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
