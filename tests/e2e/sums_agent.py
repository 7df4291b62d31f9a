"""An agent as its author has it: it imports `openai` and nothing of ours. It adds with a tool, where the model asks."""

import json
from typing import Any

from openai import AsyncOpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


client = AsyncOpenAI(base_url="http://none", api_key="none")  # one for all episodes: making it takes longer than asking


def added(arguments: str) -> str:
    try:
        left, _, right = json.loads(arguments)["expression"].partition("+")
        return str(int(left) + int(right))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "0"


async def main(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    messages: list[Any] = list(row["prompt"])
    calls = 0
    ask = client.with_options(base_url=base_url, api_key=api_key).chat.completions.create
    for _ in range(2):
        answer = await ask(model="gpt-4o-mini", messages=messages, tools=[TOOL], max_tokens=16)
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        calls += 1
        messages.append(message)
        for call in message.tool_calls:
            said = added(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return {"score": float((message.content or "").strip() == row["ground_truth"]), "calls": calls}
