"""An environment about a picture: the question is asked twice."""

from typing import Any

from rollout_server.tasks.environments.client import Client


async def ask_again(row: dict[str, Any], client: Client) -> float:
    """The second answer counts."""
    first = await client.generate(row["prompt"], max_new_tokens=1)
    asked = {"role": "user", "content": "which colour ?"}
    second = await client.generate([*row["prompt"], first.message, asked], max_new_tokens=1)
    return float(second.text == row["ground_truth"])
