"""An agent that uses what clients of OpenAI's API are documented to send: stop, streams, required calls, responses."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

TOOL = {"type": "function", "name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}}
CHAT_TOOL = {"type": "function", "function": {key: TOOL[key] for key in ("name", "parameters")}}


async def main(row: dict[str, Any], base_url: str, api_key: str) -> float:
    told: dict[str, Any] = {}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        chat, messages = client.chat.completions.create, list(row["prompt"])
        ask = {"model": "policy", "max_tokens": 40}
        plain = await chat(messages=messages, **ask)
        told["plain"] = plain.choices[0].message.content
        for size in (1, 2):  # whatever a random model says: a string that begins within its text
            stop = (told["plain"] or "?")[size : size + 2] or "?"
            answer = (await chat(messages=messages, stop=stop, **ask)).choices[0]
            told[f"stop {size}"] = [stop, answer.message.content, answer.finish_reason]
        start, chunks = time.monotonic(), list[float]()
        async for chunk in await chat(messages=messages, stream=True, **ask):
            if chunk.choices and chunk.choices[0].delta.content:
                chunks.append(time.monotonic() - start)
        told["chunks"] = chunks
        for choice in ("required", {"type": "function", "function": {"name": "calculator"}}):
            called = await chat(messages=messages, tools=[CHAT_TOOL], tool_choice=choice, **ask)
            told[f"tool_choice {choice if isinstance(choice, str) else 'named'}"] = called.choices[0].model_dump()
        first = await client.responses.create(model="policy", input="48+27", instructions="Add.", max_output_tokens=24)
        told["response"] = first.model_dump()
        further = await client.responses.create(
            model="policy", input="1+2", previous_response_id=first.id, tools=[TOOL], max_output_tokens=16
        )
        told["further"] = further.output_text
        kinds, text = [], ""
        async with client.responses.stream(model="policy", input="3+4", max_output_tokens=24) as events:
            async for event in events:
                kinds.append(event.type)
                text += event.delta if event.type == "response.output_text.delta" else ""
            told["streamed"] = [kinds, text, (await events.get_final_response()).output_text]
    body = {"model": "policy", "messages": [{"role": "user", "content": "5+6"}], "max_tokens": 30}
    async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}) as raw:
        for number in (0, 1, 2):  # the client gives up twice, and asks again
            headers = {"X-Stainless-Retry-Count": str(number)} if number else {}
            try:
                answer = await raw.post(
                    "chat/completions", json=body, headers=headers, timeout=0.05 if number < 2 else 60
                )
                told["retried"] = [number, answer.json()["choices"][0]["message"]["content"]]
                break
            except httpx.TimeoutException:
                await asyncio.sleep(0.05)
        for name, said in {
            "no such response": {"input": "x", "previous_response_id": "resp_none"},
            "no such tool": {"input": "x", "tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}},
            "no item": {"input": [{"type": "image_generation_call"}]},
        }.items():
            answer = await raw.post("responses", json={"model": "policy", **said})
            told[name] = [answer.status_code, answer.json()["error"]["param"]]
    Path(row["extra_info"]["folder"], api_key.split("-")[1]).write_text(json.dumps(told))
    return 1.0
