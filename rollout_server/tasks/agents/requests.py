"""What an agent may ask of the endpoint: bodies of OpenAI's API, checked. Pure.

Answers are trained with the logprobs under which they were sampled, so a parameter that would change the law of
sampling is refused, unless it says what the run does anyway.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollout_server.tasks.environments.protocol import MAX_ITEMS, shown

MAX_BODY_BYTES = 2 * MAX_ITEMS
"""So that no list of a body has more items than a frame to the rollout server may have."""
MAX_CHOICES = 64
MAX_STOPS = 16
MODEL = "policy"
"""The model's name, unless environment.function.agent.models has further ones."""
PLAIN = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "min_p": 0,
         "repetition_penalty": 1, "parallel_tool_calls": True}  # fmt: skip
"""Values that leave the law of sampling as it is. So does a temperature that is the run's."""
NO_EFFECT = frozenset(
    ("seed", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "prompt_cache_retention")
)  # fmt: skip
"""Taken and not used. A seed: every turn has a random stream of its own, which follows from the episode's seed."""
KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")


def _is_whole(most: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and 1 <= value <= most


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_never(value: Any) -> bool:
    return False


def _are_stops(value: Any) -> bool:
    given = [value] if isinstance(value, str) else value
    return isinstance(given, list) and len(given) <= MAX_STOPS and all(isinstance(one, str) and one for one in given)


def _is_choice(value: Any) -> bool:
    return value in ("auto", "none", "required") or (isinstance(value, dict) and _chosen(value) != "")


def _chosen(choice: Any) -> str:
    """The function that has to be called; empty for any."""
    named = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else {}
    name = named.get("name") if isinstance(named, dict) else None
    return name if isinstance(name, str) else ""


def _are_functions(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
        for tool in value
    )


def _are_flat_functions(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)
        for tool in value
    )


PLAIN_TEXT = {"type": "text"}
CHAT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (_is_whole(MAX_CHOICES), f"take an integer of 1 or more, at most {MAX_CHOICES}"),
    "max_tokens": (_is_whole(), "take an integer of 1 or more"),
    "max_completion_tokens": (_is_whole(), "take an integer of 1 or more"),
    "stream": (_is_flag, "take true or false"),
    "stream_options": (lambda value: isinstance(value, dict), "take an object"),
    "logprobs": (_is_flag, "take true or false"),
    "top_logprobs": (lambda value: value == 0, "the engine records the logprob of the sampled token alone; take 0"),
    "tools": (_are_functions, "take a list of functions"),
    "tool_choice": (_is_choice, "take 'auto', 'none', 'required', or {type: function, function: {name: ...}}"),
    "functions": (lambda value: value == [], "take tools"),
    "function_call": (_is_never, "take tools"),
    "stop": (_are_stops, f"take a string or at most {MAX_STOPS}, none of them empty"),
    "response_format": (lambda value: value == {"type": "text"}, "answers are not constrained to a form"),
    "modalities": (lambda value: value == ["text"], "there is text alone"),
    "audio": (_is_never, "there is text alone"),
    "prediction": (_is_never, "it cannot be used here"),
    "web_search_options": (_is_never, "it cannot be used here"),
    "echo": (lambda value: value is False, "a prompt has no logprobs"),
    "suffix": (lambda value: value == "", "it cannot be used here"),
}
"""By parameter: which values are taken, and why no others; or ignored with environment.function.agent.sampling."""
TEXT = CHAT | {"logprobs": (lambda value: type(value) is int and value == 0, CHAT["top_logprobs"][1])}
"""Of /completions."""
READ = frozenset(("model", "messages", "prompt", "temperature", "input", "instructions", "previous_response_id"))
"""Read otherwise."""
Form = Literal["chat", "text", "responses"]
FORMS: Mapping[Form, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "chat": CHAT,
    "text": TEXT,
    "responses": {name: CHAT[name] for name in ("stream", "stream_options", "tool_choice")}
    | {
        "max_output_tokens": CHAT["max_tokens"],
        "tools": (_are_flat_functions, "take a list of functions"),
        "text": (lambda value: isinstance(value, dict) and value.get("format", PLAIN_TEXT) == PLAIN_TEXT, "take text"),
        "include": (lambda value: value == [], "there is nothing to include"),
        "truncation": (lambda value: value == "disabled", "a context is taken whole"),
        "background": (lambda value: value is False, "answers are waited for"),
        "reasoning": (lambda value: isinstance(value, dict), "take an object"),
    },
}
"""Bodies of /chat/completions, /completions and /responses."""


class Refused(Exception):
    """An error answer in OpenAI's form; the client package makes its own exceptions of it."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a run allows."""

    temperature: float
    """rollout.temperature."""
    models: tuple[str, ...] = (MODEL,)
    ignores: bool = False
    """Sampling parameters that are not the run's are ignored, not refused."""

    def check_model(self, name: Any) -> None:
        """Raises Refused: 404."""
        if name not in self.models:
            raise Refused(
                404,
                f"the model {shown(name)} does not exist; there are {', '.join(self.models)}. Further names are given"
                " in environment.function.agent.models",
                code="model_not_found",
                param="model",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that may be sampled."""

    model: str
    context: str | list[int] | list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    max_new_tokens: int | None
    n: int
    stream: bool
    usage_in_stream: bool
    logprobs: bool = False
    stop: tuple[str, ...] = ()
    begins: str = ""
    """How the answer has to begin: with a call, where one is required."""


def read(body: bytes, rules: Rules, form: Form, history: Mapping[str, list[dict[str, Any]]]) -> Asked:
    """Check a body. `history` are conversations by the id of the response that ended them. Raises Refused."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise Refused(400, f"the body is {shown(said)}, not a JSON object")
    given = {name: value for name, value in said.items() if value is not None}
    rules.check_model(given.get("model"))
    for name, value in given.items():
        _check(name, value, rules, FORMS[form])
    limits = [given[name] for name in ("max_completion_tokens", "max_tokens", "max_output_tokens") if name in given]
    choice, stops = given.get("tool_choice", "auto"), given.get("stop", [])
    tools = [] if form == "text" or choice == "none" else given.get("tools", [])
    if form == "responses":
        fields = ("name", "description", "parameters", "strict")
        tools = [{"type": "function", "function": {key: t[key] for key in fields if key in t}} for t in tools]
    if (name := _chosen(choice)) and name not in [tool["function"].get("name") for tool in tools]:
        raise _wrong("tool_choice", name, "a function of tools")
    return Asked(
        model=given["model"],
        context=CONTEXTS[form](given) if form != "responses" else _input(given, history),
        tools=tools or None,
        max_new_tokens=min(limits, default=None),
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
        begins=_beginning(name) if tools and (name or choice == "required") else "",
        n=given.get("n", 1),
        stream=given.get("stream", False),
        usage_in_stream=given.get("stream_options", {}).get("include_usage") is True,
        logprobs=given.get("logprobs", False) is not False,
    )


def _check(name: str, value: Any, rules: Rules, table: Mapping[str, tuple[Callable[[Any], bool], str]]) -> None:
    wrong, ignore = "", "or have such parameters ignored with environment.function.agent.sampling: ignore"
    if name in table:
        is_right, why = table[name]
        wrong = "" if is_right(value) else f"{name}: {shown(value)} is not supported: {why}"
    elif (name in PLAIN or name == "temperature") and not rules.ignores:
        own = PLAIN.get(name, rules.temperature)
        key = f"rollout.temperature {own:g}" if name == "temperature" else f"{own!r}"
        if value != own:
            wrong = (
                f"{name}: {shown(value)} is not the run's own {key}: answers are trained with the logprobs under which"
                f" they were sampled. Leave {name} out, {ignore}"
            )
    elif name not in READ | NO_EFFECT | PLAIN.keys() and not rules.ignores:
        wrong = f"{shown(name)} is not known here; leave it out, {ignore}"
    if wrong:
        raise Refused(400, wrong, param=name[:100])


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of messages")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    """A message with the fields that a chat template may use; text parts are joined to one text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong("messages", message, "a message with a role")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise _wrong("messages", content, "text, or a list of text parts")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise _wrong("messages", content, "text, or a list of text parts")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise _wrong("messages", calls, "a list of tool calls")
    kept = {name: message[name] for name in KEPT if message.get(name) is not None}
    role = "system" if message["role"] == "developer" else message["role"]  # the newer name of the same
    return {**kept, "role": role, "content": content or ""}


def _beginning(name: str) -> str:
    """What a call in Hermes' form begins with: of one function, or of any."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments":' if name else "<tool_call>\n"


def _input(given: Mapping[str, Any], history: Mapping[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Items of /responses as messages: calls stand in the assistant's message, as it was answered."""
    before, items = given.get("previous_response_id"), given.get("input")
    if before is not None and before not in history:
        raise Refused(404, f"there is no response {shown(before)} in this episode", param="previous_response_id")
    messages = [*history[before]] if before is not None else []
    if isinstance(given.get("instructions"), str):
        messages = [{"role": "system", "content": given["instructions"]}, *_without_system(messages)]
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items or [None]:
        match item:
            case {"type": "function_call", "call_id": str(call), "name": str(name), "arguments": str(arguments)}:
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": name, "arguments": arguments}
                calls = [*messages[-1].get("tool_calls", ()), {"id": call, "type": "function", "function": function}]
                messages[-1] = {**messages[-1], "tool_calls": calls}
            case {"type": "function_call_output", "call_id": str(call), "output": output}:
                messages.append(_message({"role": "tool", "tool_call_id": call, "content": output}))
            case {"type": "reasoning"}:
                pass  # the answer that it belongs to is known by its ids
            case {"role": str(), "content": _}:
                messages.append(_message(item))
            case _:
                raise _wrong("input", item, "text, messages, function calls and their outputs")
    return messages


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


def _prompt(given: Mapping[str, Any]) -> str | list[int]:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
        return prompt
    raise _wrong("prompt", prompt, "text or token ids, of one prompt")


def _wrong(name: str, value: Any, wanted: str) -> Refused:
    return Refused(400, f"{name}: {shown(value)}; take {wanted}", param=name)


CONTEXTS: Mapping[Form, Callable[[Mapping[str, Any]], Any]] = {"chat": _messages, "text": _prompt}
