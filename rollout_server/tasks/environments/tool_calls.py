"""What a tool is, and tool calls in the text of an answer, as messages of OpenAI's chat form. Pure.

| style  | text                                                                                    |
|--------|-----------------------------------------------------------------------------------------|
| hermes | `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`, any number (Qwen2.5/3)  |
| openai | the whole answer is `{"name": "add", "arguments": {"a": 1}}`, or a list of them          |
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout_server.tasks.workers.frames import sendable

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
ARGUMENTS = ("arguments", "parameters")
"""`parameters` is what Llama 3 writes."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a policy may call."""

    schema: dict[str, Any]
    """In OpenAI's form, for the chat template."""
    call: Callable[..., Any]
    """An asynchronous function, unless it runs in a thread."""
    in_thread: bool = False


def message_of(text: str, turn: int) -> dict[str, Any]:
    """The assistant's message: text as `content`, calls as `tool_calls`, whose ids follow from the turn.

    A call that cannot be read has the name "" and its own text as arguments, so that a tool loop can say so.
    """
    blocks = CALL.findall(text)
    content = CALL.sub("", text).strip() if blocks else text
    if not blocks and (bare := _bare(text)):
        blocks, content = bare, ""
    if not blocks:
        return {"role": "assistant", "content": text}
    calls = []
    for number, block in enumerate(blocks):
        name, arguments = _read(block)
        function = {"name": name, "arguments": arguments}
        calls.append({"id": f"call_{turn}_{number}", "type": "function", "function": function})
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _bare(text: str) -> list[str]:
    """The calls of an answer that is nothing but calls in JSON."""
    stripped = text.strip()
    if not stripped.startswith(("{", "[")):
        return []
    value = _json(stripped)
    items = value if isinstance(value, list) else [value]
    return [json.dumps(item) for item in items] if items and all(map(_is_call, items)) else []


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and any(key in value for key in ARGUMENTS)


def _read(block: str) -> tuple[str, str]:
    """(name, arguments as JSON)."""
    value = _json(block.strip())
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "", block.strip()
    arguments: Any = next((value[key] for key in ARGUMENTS if key in value), {})
    return sendable(value["name"]), sendable(arguments) if isinstance(arguments, str) else json.dumps(arguments)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
