"""Turns in the JSON of OpenAI's API, whole or in the events of a stream. Pure.

Every answer is a chat completion, and every stream the chunks of one; /completions and /responses are what these
become in another spelling.
"""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollout_server.tasks.agents.requests import Form, SamplingRequest
from rollout_server.tasks.environments import Turn

DONE = b"data: [DONE]\n\n"
THINK, THOUGHT = "<think>", "</think>"
CALL, BARE = "<tool_call", ("{", "[")
"""What may begin a call: in a stream, nothing is shown from there on before the answer is whole."""
Pieces = Sequence[Sequence[str]]
"""Text of each token of each turn; empty where no logprobs are asked for."""
Json = dict[str, Any]


def apart(text: str) -> tuple[str, str]:
    """(reasoning, what is said) of an answer's text, also while it grows."""
    if THOUGHT in text:
        reasoning, _, said = text.partition(THOUGHT)
        return reasoning.removeprefix(THINK).strip(), said.lstrip()
    return (text.removeprefix(THINK).lstrip(), "") if text.startswith(THINK) else ("", text)


def message_of(turn: Turn, asked: SamplingRequest) -> Json:
    """What the assistant says. Calls are read where tools are offered, and if all can be read and none was cut."""
    if asked.form == "text":
        return {"content": turn.text}
    calls = turn.message.get("tool_calls", ()) if asked.tools is not None and turn.finish_reason != "length" else ()
    has_calls = bool(calls) and all(call["function"]["name"] for call in calls)  # clients fail on one without a name
    reasoning, said = apart(turn.message["content"] if has_calls else turn.text)
    message: Json = {"role": "assistant", "content": (said or None) if has_calls else said}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": calls} if has_calls else {})


def whole(name: str, asked: SamplingRequest, turns: Sequence[Turn], pieces: Pieces) -> Json:
    """The body of an answer that is not streamed."""
    completion = _completion(name, asked, turns, pieces)
    if asked.form == "responses":
        return _response(name, asked, completion)
    return completion if asked.form == "chat" else _as_text(completion)


class Stream:
    """Server-sent events of one answer: text as it comes, and the rest once it is whole."""

    def __init__(self, name: str, asked: SamplingRequest) -> None:
        self.name, self.asked = name, asked
        self._sent: dict[int, dict[str, str]] = {}
        """By choice: what was sent of its texts."""
        self._head = _head(name, asked, "chat.completion.chunk")

    def grown(self, text: str) -> Iterator[bytes]:
        """Events of the text so far, of the first choice."""
        if self.asked.form != "text" and THINK.startswith(text):
            return  # it may begin reasoning
        reasoning, said = apart(text) if self.asked.form != "text" else ("", text)
        said = _before_a_call(said) if self.asked.tools else said
        yield from self._more(0, {"reasoning_content": _before(reasoning, THOUGHT).rstrip(), "content": said})

    def ended(self, turns: Sequence[Turn], pieces: Pieces) -> Iterator[bytes]:
        """Events of what is left, the closing one included."""
        completion = _completion(self.name, self.asked, turns, pieces)
        for choice in completion["choices"]:
            index, message = choice["index"], choice["message"]
            yield from self._more(index, message)
            for number, call in enumerate(message.get("tool_calls", ())):
                yield self._chunk(index, {"tool_calls": [{**call, "index": number}]})
            yield self._chunk(index, {}, logprobs=choice["logprobs"], finish_reason=choice["finish_reason"])
        if self.asked.usage_in_stream:
            yield self._event({**self._head, "choices": [], "usage": completion["usage"]})
        yield DONE

    def failed(self, error: Json) -> bytes:
        """The event that ends a stream which has begun, and cannot go on."""
        return _data(error)

    def _more(self, index: int, message: Mapping[str, Any]) -> Iterator[bytes]:
        """Events of what a message has more than was sent."""
        if index not in self._sent:
            self._sent[index] = {"reasoning_content": "", "content": ""}
            yield from self._begun(index)
        for key, sent in self._sent[index].items():
            text = message.get(key) or ""
            if len(text) > len(sent) and text.startswith(sent):
                self._sent[index][key] = text
                yield from self._grew(index, key, text[len(sent) :], is_first=not sent)

    def _begun(self, index: int) -> Iterator[bytes]:
        yield self._chunk(index, {"role": "assistant", "content": ""})

    def _grew(self, index: int, key: str, delta: str, *, is_first: bool) -> Iterator[bytes]:
        yield self._chunk(index, {key: delta})

    def _chunk(self, index: int, delta: Json, *, logprobs: Any = None, finish_reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._event({**self._head, "choices": [choice]})

    def _event(self, chunk: Json) -> bytes:
        return _data(_as_text(chunk) if self.asked.form == "text" else chunk)


class ResponseStream(Stream):
    """As a Stream, in the typed events of /responses."""

    def __init__(self, name: str, asked: SamplingRequest) -> None:
        super().__init__(name, asked)
        self._numbers = itertools.count()
        self._places: dict[str, int] = {}
        """`output_index` of the items that have begun, by type."""
        self._thinks = False

    def ended(self, turns: Sequence[Turn], pieces: Pieces) -> Iterator[bytes]:
        completion = _completion(self.name, self.asked, turns, pieces)
        body, message = _response(self.name, self.asked, completion), completion["choices"][0]["message"]
        yield from self._more(0, message)
        body["output"].sort(key=lambda item: self._places.get(item["type"], len(self._places)))  # as they have begun
        for index, item in enumerate(body["output"]):
            place = {"item_id": item["id"], "output_index": index}
            if item["type"] == "reasoning":
                yield from self._thought()
                continue
            if item["type"] == "message":
                if not message["content"]:
                    yield from self._grew(0, "content", "", is_first=True)
                (part,) = item["content"]
                done = {**place, "content_index": 0}
                yield self._typed("response.output_text.done", **done, text=part["text"], logprobs=[])
                yield self._typed("response.content_part.done", **done, part=part)
            else:
                yield self._typed("response.output_item.added", output_index=index, item={**item, "arguments": ""})
                given = {"name": item["name"], "arguments": item["arguments"]}
                yield self._typed("response.function_call_arguments.delta", **place, delta=item["arguments"])
                yield self._typed("response.function_call_arguments.done", **place, **given)
            yield self._typed("response.output_item.done", output_index=index, item=item)
        yield self._typed(f"response.{body['status']}", response=body)

    def _begun(self, index: int) -> Iterator[bytes]:
        started = _response(self.name, self.asked, None)
        yield self._typed("response.created", response=started)
        yield self._typed("response.in_progress", response=started)

    def _grew(self, index: int, key: str, delta: str, *, is_first: bool) -> Iterator[bytes]:
        if key != "content":
            yield from self._thinking(delta, is_first=is_first)
            return
        yield from self._thought()
        at = self._places.setdefault("message", len(self._places))
        place = {"item_id": f"msg_{self.name}", "output_index": at, "content_index": 0}
        if is_first:
            item = _said(self.name, "", "in_progress")
            yield self._typed("response.output_item.added", output_index=at, item={**item, "content": []})
            yield self._typed("response.content_part.added", **place, part=item["content"][0])
        yield self._typed("response.output_text.delta", **place, delta=delta, logprobs=[])

    def _thinking(self, delta: str, *, is_first: bool) -> Iterator[bytes]:
        at = self._places.setdefault("reasoning", len(self._places))
        item, self._thinks = _reasoned(self.name, ""), True
        place = {"item_id": item["id"], "output_index": at, "summary_index": 0}
        if is_first:
            yield self._typed("response.output_item.added", output_index=at, item={**item, "summary": []})
            yield self._typed("response.reasoning_summary_part.added", **place, part=item["summary"][0])
        yield self._typed("response.reasoning_summary_text.delta", **place, delta=delta)

    def _thought(self) -> Iterator[bytes]:
        """Events of the end of the reasoning, where some goes on."""
        if self._thinks:
            self._thinks, at = False, self._places["reasoning"]
            item = _reasoned(self.name, text := self._sent[0]["reasoning_content"])
            place = {"item_id": item["id"], "output_index": at, "summary_index": 0}
            yield self._typed("response.reasoning_summary_text.done", **place, text=text)
            yield self._typed("response.reasoning_summary_part.done", **place, part=item["summary"][0])
            yield self._typed("response.output_item.done", output_index=at, item=item)

    def _typed(self, kind: str, **fields: Any) -> bytes:
        said = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\n".encode() + _data(said)


STREAMS: Mapping[Form, type[Stream]] = {"chat": Stream, "text": Stream, "responses": ResponseStream}


def _before_a_call(text: str) -> str:
    """What of a growing text is certainly none."""
    if text.lstrip().startswith(BARE):
        return ""
    return _before(text, CALL)


def _before(text: str, mark: str) -> str:
    """What of a growing text comes before `mark`, or before what may become it."""
    text = text.partition(mark)[0]
    return text[: len(text) - next((size for size in range(len(mark), 0, -1) if text.endswith(mark[:size])), 0)]


def _head(name: str, asked: SamplingRequest, kind: str) -> Json:
    return {"id": name, "object": kind, "created": int(time.time()), "model": asked.model}


def _completion(name: str, asked: SamplingRequest, turns: Sequence[Turn], pieces: Pieces) -> Json:
    choices = []
    for number, (turn, texts) in enumerate(zip(turns, pieces, strict=True)):
        message = message_of(turn, asked)
        content = [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(texts, turn.logprobs if asked.logprobs else (), strict=True)
        ]
        logprobs = {"content": content, "refusal": None} if asked.logprobs else None
        reason = "tool_calls" if "tool_calls" in message else turn.finish_reason
        message = {"refusal": None, **message}
        choices.append({"index": number, "message": message, "logprobs": logprobs, "finish_reason": reason})
    prompt, said = len(turns[0].context_ids) // 4, sum(len(turn.token_ids) for turn in turns)
    usage = {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
    return {**_head(name, asked, "chat.completion"), "choices": choices, "usage": usage}


def _as_text(completion: Json) -> Json:
    """A chat completion, or a chunk of one, as /completions has it."""
    choices = []
    for choice in completion["choices"]:
        said, logprobs = choice.get("message") or choice["delta"], choice["logprobs"]
        if logprobs is not None:
            tokens = [one["token"] for one in logprobs["content"]]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [one["logprob"] for one in logprobs["content"]],
                "top_logprobs": None,
                "text_offset": list(itertools.accumulate(map(len, tokens), initial=0))[:-1],
            }
        kept = {"index": choice["index"], "logprobs": logprobs, "finish_reason": choice["finish_reason"]}
        choices.append({**kept, "text": said.get("content") or ""})
    return {**completion, "object": "text_completion", "choices": choices}


def _response(name: str, asked: SamplingRequest, completion: Json | None) -> Json:
    """A chat completion as /responses has it; without one, while it is sampled."""
    output: list[Json] = []
    status, usage = "in_progress", None
    if completion is not None:
        (choice,), counts = completion["choices"], completion["usage"]
        message = choice["message"]
        if "reasoning_content" in message:
            output.append(_reasoned(name, message["reasoning_content"]))
        calls = message.get("tool_calls", ())
        if message["content"] or not calls:
            output.append(_said(name, message["content"] or "", "completed"))
        for call in calls:
            named = {"call_id": call["id"], "status": "completed", **call["function"]}
            output.append({"type": "function_call", "id": f"fc_{name}_{call['id']}", **named})
        status = "incomplete" if choice["finish_reason"] == "length" else "completed"
        usage = {
            "input_tokens": counts["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }  # fmt: skip
    return {
        "id": name, "object": "response", "created_at": int(time.time()), "model": asked.model, "status": status,
        "error": None, "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None, "output": output, "metadata": {}, "parallel_tool_calls": True, "temperature": None,
        "top_p": None, "tool_choice": "auto",
        "tools": [{"type": "function", **tool["function"]} for tool in asked.tools or ()],
        "text": {"format": {"type": "text"}}, "truncation": "disabled", "usage": usage,
    }  # fmt: skip


def _said(name: str, text: str, status: str) -> Json:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]}


def _reasoned(name: str, text: str) -> Json:
    return {"id": f"rs_{name}", "type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}


def _data(value: Json) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"
