"""The tool loop behind a pause: what makes a soak light. Options: `pause_s`, before an episode's first turn."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rollout_server.environments import tool_loop
from rollout_server.environments.client import Client


def prepare(options: Mapping[str, Any]) -> None:
    """Load the calculator."""
    tool_loop.prepare({key: value for key, value in options.items() if key != "pause_s"})


async def rollout(row: dict[str, Any], client: Client) -> Any:
    """One episode."""
    await asyncio.sleep(float(client.options["pause_s"]))
    return await tool_loop.rollout(row, client)
