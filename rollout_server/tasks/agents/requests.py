"""What an agent may ask of the endpoint: bodies of OpenAI's API, checked. Pure.

The three forms (/chat/completions, /completions, /responses) share one table of parameters; they differ in how they
spell the context, which is read here into what a turn is asked with.

Answers are trained with the logprobs under which they were sampled, so a parameter that would change the law of
sampling is refused, unless it says what the run does anyway.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollout_server.tasks.environments.protocol import MAX_ITEMS, shown

Form = Literal["chat", "text", "responses"]
History = Mapping[str, list[dict[str, Any]]]
"""Conversations of an episode by the id of the response that ended them."""
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
     "prompt_cache_retention", "reasoning")
)  # fmt: skip
"""Taken and not used. A seed: every turn has a random stream of its own, which follows from the episode's seed."""
EMPTY = frozenset(
    ("functions", "function_call", "audio", "prediction", "web_search_options", "echo", "suffix", "include",
     "background", "top_logprobs")
)  # fmt: skip
"""What cannot be had here, so nothing may be asked of it."""
READ = frozenset(("model", "messages", "prompt", "temperature", "input", "instructions", "previous_response_id"))
"""Read otherwise."""
KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")
PLAIN_TEXT = {"type": "text"}
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def _are_stops(value: Any) -> bool:
    given = [value] if isinstance(value, str) else value
    return isinstance(given, list) and len(given) <= MAX_STOPS and all(isinstance(one, str) and one for one in given)


def _function(said: Any) -> dict[str, Any]:
    """The function of a tool or of a choice, which /responses does not nest; empty for anything else."""
    named = said.get("function", said) if isinstance(said, dict) and said.get("type") == "function" else None
    return {key: value for key, value in named.items() if key != "type"} if isinstance(named, dict) else {}


def _are_functions(value: Any) -> bool:
    return isinstance(value, list) and all(_function(tool) for tool in value)


def _is_choice(value: Any) -> bool:
    return value in ("auto", "none", "required") or bool(_chosen(value))


def _chosen(choice: Any) -> str:
    """The function that has to be called; empty for any."""
    name = _function(choice).get("name")
    return name if isinstance(name, str) else ""


PARAMETERS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda value: type(value) is int and 1 <= value <= MAX_CHOICES, f"an integer from 1 to {MAX_CHOICES}"),
    **{name: (lambda value: type(value) is int and value >= 1, "an integer of 1 or more") for name in LIMITS},
    "stream": (lambda value: type(value) is bool, "true or false"),
    "stream_options": (lambda value: isinstance(value, dict), "an object"),
    "logprobs": (
        lambda value: type(value) is bool or (type(value) is int and value == 0),
        "true or false, or 0 in /completions: the engine records the logprob of the sampled token alone",
    ),
    "tools": (_are_functions, "a list of functions"),
    "tool_choice": (_is_choice, "'auto', 'none', 'required', or {type: function, function: {name: ...}}"),
    "stop": (_are_stops, f"a string or at most {MAX_STOPS}, none of them empty"),
    "response_format": (lambda value: value == PLAIN_TEXT, "{type: text}: answers are not constrained to a form"),
    "text": (
        lambda value: isinstance(value, dict) and value.get("format", PLAIN_TEXT) == PLAIN_TEXT,
        "{format: {type: text}}: answers are not constrained to a form",
    ),
    "modalities": (lambda value: value == ["text"], "[text]: there is text alone"),
    "truncation": (lambda value: value == "disabled", "'disabled': a context is taken whole"),
}
"""By parameter: which values are taken, also with environment.function.agent.sampling: ignore, and their names."""


class ApiError(Exception):
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
        """Raises ApiError: 404."""
        if name not in self.models:
            raise ApiError(
                404,
                f"the model {shown(name)} does not exist; there are {', '.join(self.models)}. Further names are given"
                " in environment.function.agent.models",
                code="model_not_found",
                param="model",
            )

    def check(self, name: str, value: Any) -> None:
        """Whether a parameter may have a value. Raises ApiError: 400."""
        ignore = "or have such parameters ignored with environment.function.agent.sampling: ignore"
        own = self.temperature if name == "temperature" else PLAIN.get(name)
        if name in PARAMETERS and not PARAMETERS[name][0](value):
            raise _wrong(name, value, PARAMETERS[name][1])
        if name in EMPTY and value:
            raise ApiError(400, f"{name}: it cannot be used here; leave it out", param=name)
        if own is not None and value != own and not self.ignores:
            key = f"rollout.temperature {own:g}" if name == "temperature" else f"{own!r}"
            raise ApiError(
                400,
                f"{name}: {shown(value)} is not the run's own {key}: answers are trained with the logprobs under which"
                f" they were sampled. Leave {name} out, {ignore}",
                param=name,
            )
        if name not in READ | NO_EFFECT | EMPTY | PARAMETERS.keys() | PLAIN.keys() and not self.ignores:
            raise ApiError(400, f"{shown(name)} is not known here; leave it out, {ignore}", param=name[:100])


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """A request that may be sampled."""

    form: Form
    model: str
    context: str | list[int] | list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    max_new_tokens: int | None
    n: int
    stream: bool
    usage_in_stream: bool
    logprobs: bool
    stop: tuple[str, ...]
    begins: str
    """How the answer has to begin: with a call, where one is required."""


def read(body: bytes, rules: Rules, form: Form, history: History) -> SamplingRequest:
    """Check a body. Raises ApiError."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise ApiError(400, f"the body is {shown(said)}, not a JSON object")
    given = {name: value for name, value in said.items() if value is not None}
    rules.check_model(given.get("model"))
    for name, value in given.items():
        rules.check(name, value)
    choice, stops = given.get("tool_choice", "auto"), given.get("stop", [])
    offered: list[Any] = [] if form == "text" or choice == "none" else given.get("tools", [])
    tools = [{"type": "function", "function": _function(tool)} for tool in offered]
    if (name := _chosen(choice)) and name not in [_function(tool).get("name") for tool in offered]:
        raise _wrong("tool_choice", name, "a function of tools")
    context = _input(given, history) if form == "responses" else _prompt(given) if form == "text" else _messages(given)
    return SamplingRequest(
        form=form,
        model=given["model"],
        context=context,
        tools=tools or None,
        max_new_tokens=min((given[name] for name in LIMITS if name in given), default=None),
        n=given.get("n", 1) if form != "responses" else 1,
        stream=given.get("stream", False),
        usage_in_stream=given.get("stream_options", {}).get("include_usage") is True,
        logprobs=given.get("logprobs", False) is not False,
        stop=(stops,) if isinstance(stops, str) else tuple(stops),
        begins=_beginning(name) if tools and (name or choice == "required") else "",
    )


def _beginning(name: str) -> str:
    """What a call in Hermes' form begins with: of one function, or of any."""
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments":' if name else "<tool_call>\n"


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", messages, "a list of messages")
    return [_message(message) for message in messages]


def _message(message: Any) -> dict[str, Any]:
    """A message with the fields that a chat template may use; text parts are joined to one text."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong("messages", message, "a message with a role")
    content, calls = message.get("content") or "", message.get("tool_calls") or []
    if isinstance(content, list) and all(isinstance(one, dict) and isinstance(one.get("text"), str) for one in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _wrong("messages", content, "text, or a list of text parts")
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise _wrong("messages", calls, "a list of tool calls")
    kept = {name: message[name] for name in KEPT if message.get(name) is not None}
    role = "system" if message["role"] == "developer" else message["role"]  # the newer name of the same
    return {**kept, "role": role, "content": content}


def _input(given: Mapping[str, Any], history: History) -> list[dict[str, Any]]:
    """Items of /responses as messages: calls stand in the assistant's message, as it was answered."""
    before, items = given.get("previous_response_id"), given.get("input")
    if before is not None and (not isinstance(before, str) or before not in history):
        raise ApiError(404, f"there is no response {shown(before)} in this episode", param="previous_response_id")
    messages = [*history[before]] if before is not None else []
    if isinstance(given.get("instructions"), str):  # those of the response before are not carried over
        said_before = messages[1:] if messages and messages[0]["role"] == "system" else messages
        messages = [{"role": "system", "content": given["instructions"]}, *said_before]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    for item in items if isinstance(items, list) and items else [None]:
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
    if not messages:
        raise _wrong("input", items, "text, messages, function calls and their outputs")
    return messages


def _prompt(given: Mapping[str, Any]) -> str | list[int]:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
        return prompt
    raise _wrong("prompt", prompt, "text or token ids, of one prompt")


def _wrong(name: str, value: Any, wanted: str) -> ApiError:
    return ApiError(400, f"{name}: {shown(value)} is not supported; take {wanted}", param=name)
