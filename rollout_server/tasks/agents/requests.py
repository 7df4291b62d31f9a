"""What an agent may ask of the endpoint: bodies of OpenAI's API, checked. Pure.

Answers are trained with the logprobs under which they were sampled, so a parameter that would change the law of
sampling is refused, unless it says what the run does anyway.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_server.tasks.environments.protocol import MAX_ITEMS, shown

MAX_BODY_BYTES = 2 * MAX_ITEMS
"""So that no list of a body has more items than a frame to the rollout server may have."""
MAX_CHOICES = 64
MODEL = "policy"
"""The model's name, unless environment.options.models has further ones."""
PLAIN = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "best_of": 1, "min_p": 0,
         "repetition_penalty": 1, "parallel_tool_calls": True}  # fmt: skip
"""Values that leave the law of sampling as it is. So does a temperature that is the run's."""
NO_EFFECT = frozenset(
    ("seed", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "prompt_cache_retention")
)  # fmt: skip
"""Taken and not used. A seed: every turn has a random stream of its own, which follows from the episode's seed."""
ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "stop": (lambda value: value == [], "answers end where the model ends them"),
    "response_format": (lambda value: value == {"type": "text"}, "answers are not constrained to a form"),
    "tool_choice": (lambda value: value in ("auto", "none"), "the policy chooses; take 'auto' or 'none'"),
    "function_call": (lambda value: False, "take tools"),
    "functions": (lambda value: value == [], "take tools"),
    "modalities": (lambda value: value == ["text"], "there is text alone"),
    "audio": (lambda value: False, "there is text alone"),
    "prediction": (lambda value: False, "it cannot be used here"),
    "web_search_options": (lambda value: False, "it cannot be used here"),
    "top_logprobs": (lambda value: value == 0, "the engine records the logprob of the sampled token alone; take 0"),
    "echo": (lambda value: value is False, "a prompt has no logprobs"),
    "suffix": (lambda value: value == "", "it cannot be used here"),
}
"""By parameter: which values are taken, and why no others; also where environment.options.sampling is `ignore`."""
READ = frozenset(
    ("model", "messages", "prompt", "tools", "max_tokens", "max_completion_tokens", "n", "stream", "stream_options",
     "logprobs", "temperature")
)  # fmt: skip
KEPT = ("role", "content", "name", "tool_calls", "tool_call_id")


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
                " in environment.options.models",
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
    logprobs: bool


def read(body: bytes, rules: Rules, *, is_chat: bool) -> Asked:
    """Check a body of /chat/completions or /completions. Raises Refused."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from error
    if not isinstance(said, dict):
        raise Refused(400, f"the body is {shown(said)}, not a JSON object")
    given = {name: value for name, value in said.items() if value is not None}
    rules.check_model(given.get("model"))
    _check_parameters(given, rules)
    tools = _tools(given)
    limits = [_integer(given, name, 1, None) for name in ("max_completion_tokens", "max_tokens") if name in given]
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object")
    return Asked(
        model=given["model"],
        context=_messages(given) if is_chat else _prompt(given),
        tools=tools if is_chat else None,
        max_new_tokens=min(limits, default=None),
        n=_integer(given, "n", 1, MAX_CHOICES) if "n" in given else 1,
        stream=_flag(given, "stream"),
        usage_in_stream=options.get("include_usage") is True,
        logprobs=_flag(given, "logprobs") if is_chat else _completion_logprobs(given),
    )


def _check_parameters(given: Mapping[str, Any], rules: Rules) -> None:
    for name, value in given.items():
        if name in ALLOWED:
            is_allowed, why = ALLOWED[name]
            if not is_allowed(value):
                raise Refused(400, f"{name}: {shown(value)} is not supported: {why}", param=name)
        elif name in PLAIN or name == "temperature":
            own = PLAIN.get(name, rules.temperature)
            if value != own and not rules.ignores:
                key = f"rollout.temperature {own:g}" if name == "temperature" else f"{own!r}"
                raise Refused(
                    400,
                    f"{name}: {shown(value)} is not the run's own {key}: answers are trained with the logprobs under"
                    f" which they were sampled. Leave {name} out, or have such parameters ignored with"
                    " environment.options.sampling: ignore",
                    param=name,
                )
        elif name not in READ and name not in NO_EFFECT and not rules.ignores:
            raise Refused(
                400,
                f"{shown(name)} is not known here; leave it out, or have such parameters ignored with"
                " environment.options.sampling: ignore",
                param=str(name)[:100],
            )


def _tools(given: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = given.get("tools", [])
    is_right = isinstance(tools, list) and all(
        isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("function"), dict)
        for tool in tools
    )
    if not is_right:
        raise _wrong("tools", tools, "a list of functions")
    return tools if tools and given.get("tool_choice") != "none" else None


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


def _prompt(given: Mapping[str, Any]) -> str | list[int]:
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int and 0 <= token < 2**31 for token in prompt):
        return prompt
    raise _wrong("prompt", prompt, "text or token ids, of one prompt")


def _completion_logprobs(given: Mapping[str, Any]) -> bool:
    if "logprobs" not in given:
        return False
    if type(given["logprobs"]) is not int or given["logprobs"] != 0:
        raise _wrong("logprobs", given["logprobs"], "0: the engine records the logprob of the sampled token alone")
    return True


def _flag(given: Mapping[str, Any], name: str) -> bool:
    if type(value := given.get(name, False)) is not bool:
        raise _wrong(name, value, "true or false")
    return value


def _integer(given: Mapping[str, Any], name: str, least: int, most: int | None) -> int:
    value = given[name]
    if type(value) is not int or value < least or (most is not None and value > most):
        raise _wrong(name, value, f"an integer of {least} or more" + (f", at most {most}" if most else ""))
    return value


def _wrong(name: str, value: Any, wanted: str) -> Refused:
    return Refused(400, f"{name}: {shown(value)}; take {wanted}", param=name)
