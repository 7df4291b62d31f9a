"""An agent that asks for what it must not have, with the client package and without; it writes what it was told."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai

SURROGATE = b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}'
"""No text that any encoding has."""
held: list[tuple[str, str]] = []
"""Lease and key of the episodes that this process has seen."""


async def main(row: dict[str, Any], base_url: str, api_key: str) -> float:
    told: dict[str, Any] = {}
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    messages = row["prompt"]

    async def ask(name: str, by: Any = client, **changes: Any) -> None:
        try:
            await by.chat.completions.create(**{"model": "policy", "messages": messages, "max_tokens": 1, **changes})
            told[name] = "answered"
        except openai.APIStatusError as error:
            told[name] = [type(error).__name__, error.code, error.param, error.message]

    await ask("plain")
    for number, key in enumerate(("none", "slipstream-0-x", f"{api_key}x", "slipstream-9999-y", "slipstream-\u00b2-z")):
        if key.isascii():
            await ask(f"key {number}", client.with_options(api_key=key))
    lease = row["extra_info"]["mode"]
    for number, key in enumerate(key for other, key in held if other != lease):
        await ask(f"ended {number}", client.with_options(api_key=key))
    held.append((lease, api_key))
    await ask("model", model="gpt-4o")
    await ask("named model", model="gpt-4o-mini")
    for name, value in {
        "temperature": 0.2, "top_p": 0.5, "stop": [""], "top_logprobs": 3, "n": 1000, "max_tokens": 0,
        "tool_choice": "must", "response_format": {"type": "json_object"}, "frequency_penalty": 1,
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    }.items():  # fmt: skip
        await ask(name, **{name: value})
    await ask("unknown", extra_body={"beam_width": 4})
    await ask("number", extra_body={"tools": [{"type": "function", "function": {"name": 1 << 80}}]})
    await ask("same temperature", temperature=1, top_p=1, n=1, seed=7, user="me", stop=None)
    async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}) as raw:
        for name, body in {
            "garbage": b"{",
            "surrogate": SURROGATE,
            "flood": b"[" * (3 << 20),
            "deep": b"[" * 100_000,
            "list": b"[]",
        }.items():
            answer = await raw.post("chat/completions", content=body)
            told[name] = [answer.status_code, answer.json()["error"]["code"], "", answer.json()["error"]["message"]]
        answer = await raw.get("files")
        told["url"] = [answer.status_code, answer.json()["error"]["code"], "", ""]
    held_back: Any = [{"role": "user", "content": "9*9"}]  # which the engine does not answer
    try:
        await client.with_options(timeout=1.0).chat.completions.create(model="policy", messages=held_back)
        told["left"] = "answered"
    except openai.APITimeoutError:
        told["left"] = "left"
    await asyncio.sleep(4.0)  # for as long the client might ask again
    for _ in range(100):
        told["turns"] = None
        await ask("turns")
        if told["turns"] != "answered":
            break
        await asyncio.sleep(0)
    Path(row["extra_info"]["folder"], api_key.split("-")[1]).write_text(json.dumps(told))
    await client.chat.completions.create(model="policy", messages=messages, max_tokens=1)
    return 1.0
