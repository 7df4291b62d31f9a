"""An environment: further tries for less. Name it by `environment.function: {environment.py:tries: {most: 3}}`."""

from typing import Any


async def tries(row: dict[str, Any], client: Any, *, most: int = 2) -> dict[str, float]:
    """`turn.ids` is the context and what was sampled after it; what is appended is not trained."""
    context: Any = row["prompt"]
    for number in range(1, most + 1):
        turn = await client.generate(context, max_new_tokens=7)
        if turn.text.strip() == row["ground_truth"]:
            return {"score": 1 / number, "tries": number}
        context = [*turn.ids, *await client.encode("=")]
    return {"score": 0.0, "tries": most}
