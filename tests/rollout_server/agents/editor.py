"""An agent that stops answers within a token, streamed and not, continues them, and edits its own history."""

import json
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI


async def main(row: dict[str, Any], base_url: str, api_key: str) -> float:
    asked: dict[str, list[dict[str, str]]] = {}
    texts: dict[str, str] = {}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask(name: str, messages: list[dict[str, str]], **options: Any) -> dict[str, str]:
            """Ask and keep what was asked and answered; the answer as a message."""
            asked[name] = messages
            answer: Any = await client.chat.completions.create(model="policy", messages=messages, **options)  # type: ignore[call-overload]
            if options.get("stream"):
                texts[name] = "".join([part.choices[0].delta.content or "" async for part in answer if part.choices])
            else:
                texts[name] = answer.choices[0].message.content
            return {"role": "assistant", "content": texts[name]}

        start, further = row["prompt"], {"role": "user", "content": "1+2"}
        whole = await ask("whole", start, max_tokens=6)
        await ask("continued", [*start, whole, further], max_tokens=4)
        await ask("edited", [*start, {"role": "assistant", "content": "9+9"}, further], max_tokens=4)
        stopped = await ask("stopped", start, max_tokens=24, stop=";")
        await ask("behind the stop", [*start, stopped, further], max_tokens=4)
        await ask("streamed", start, max_tokens=24, stop=[";"], stream=True)
    Path(row["extra_info"]["folder"], api_key.split("-")[1]).write_text(json.dumps({"asked": asked, "texts": texts}))
    return 1.0
