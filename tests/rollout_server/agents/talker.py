"""An agent as its author has it: it imports `openai` and nothing of ours. Every way to ask, once."""

import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

ADD = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}},
}


async def main(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    seen: list[dict[str, Any]] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        chat = client.chat.completions.create
        messages: list[Any] = list(row["prompt"])
        whole = await chat(model="policy", messages=messages, tools=[ADD], max_tokens=24, logprobs=True)
        entries = whole.choices[0].logprobs.content
        seen.append({"turn": "whole", "logprobs": [one.logprob for one in entries], "usage": whole.usage.model_dump()})
        messages += [whole.choices[0].message, {"role": "user", "content": [{"type": "text", "text": "1+2"}]}]

        text, logprobs, usage, reason = "", [], None, None
        options = {"include_usage": True}
        async for chunk in await chat(
            model="policy",
            messages=messages,
            tools=[ADD],
            max_tokens=24,
            logprobs=True,
            stream=True,
            stream_options=options,
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                logprobs += [one.logprob for one in (choice.logprobs.content if choice.logprobs else [])]
                reason = choice.finish_reason or reason
        seen.append({"turn": "stream", "logprobs": logprobs, "usage": usage.model_dump(), "text": text})
        assert reason in ("stop", "length")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "3+4"}]

        several = await chat(model="policy", messages=messages, max_tokens=12, n=2, tools=[ADD], logprobs=True)
        for choice in several.choices:
            seen.append({"turn": "n", "logprobs": [one.logprob for one in choice.logprobs.content]})
        plain = await client.completions.create(model="policy", prompt="5+6", max_tokens=12, logprobs=0)
        seen.append(
            {"turn": "text", "logprobs": plain.choices[0].logprobs.token_logprobs, "text": plain.choices[0].text}
        )
        names = [model.id async for model in client.models.list()]
    said = {"seen": seen, "models": names, "key": api_key}
    Path(row["extra_info"]["folder"], api_key.split("-")[1]).write_text(json.dumps(said))
    return {"score": float(len(seen)), "asked": 5.0}
