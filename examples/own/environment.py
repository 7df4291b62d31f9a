"""An environment: a second try for half the reward. Name it by `environment.function: environment.py:two_tries`."""

from typing import Any


async def two_tries(row: dict[str, Any], client: Any) -> dict[str, float]:
    """`turn.ids` is the context and what was sampled after it; what is appended is not trained."""
    context: Any = row["prompt"]
    for tries in (1, 2):
        turn = await client.generate(context, max_new_tokens=7)
        if turn.text.strip() == row["ground_truth"]:
            return {"score": 1 / tries, "tries": tries}
        context = [*turn.ids, *await client.encode("=")]
    return {"score": 0.0, "tries": 2}
