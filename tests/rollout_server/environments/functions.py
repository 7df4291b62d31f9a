"""Functions of a user, as tests give them: they run in an environment process."""

import asyncio
import contextlib
import os
import time
from typing import Any

from rollout_server.tasks.environments import Trajectory
from rollout_server.tasks.environments.client import Client

stuttered: list[bool] = []


async def three_turns(row: dict[str, Any], client: Client) -> float:
    """Three turns by token ids, with two tokens of the environment's between them."""
    turn = await client.generate([5, 9], max_new_tokens=3)
    for _ in range(2):
        turn = await client.generate([*turn.ids, 7, 8], max_new_tokens=3)
    return float(client.seed % 7)


async def compacts(row: dict[str, Any], client: Client) -> dict[str, float]:
    """A conversation whose context is compacted once, and a sub-agent beside it."""
    first = await client.generate([5, 9], max_new_tokens=3)
    await asyncio.gather(client.generate([*first.ids, 4], max_new_tokens=2), client.generate([11, 12, 13]))
    return {"score": float(client.seed % 7), "told": 2.0}


async def acts(row: dict[str, Any], client: Client, *, acts: list[Any]) -> Any:
    """What the options say, one after the other."""
    for what, value in acts:
        match what:
            case "turn":
                await client.generate(value[0], max_new_tokens=value[1])
            case "sleep":
                await asyncio.sleep(value)
            case "exit":
                os._exit(value)
            case "raise":
                raise KeyError(value)
            case "return":
                return value
    return None


async def leaves_out(row: dict[str, Any], client: Client) -> Trajectory:
    turn = await client.generate([5, 6], max_new_tokens=2)
    await client.generate([*turn.ids, 7], max_new_tokens=2)
    return Trajectory(reward=1.0, leave_out=[0], metrics={"own": 3.0})


async def never_ends(row: dict[str, Any], client: Client) -> float:
    """Until the context is full."""
    turn = await client.generate([5, 6], max_new_tokens=2)
    while True:
        turn = await client.generate([*turn.ids, 7], max_new_tokens=2)


async def blocks(row: dict[str, Any], client: Client) -> float:
    """One row of several blocks the loop that all share."""
    await client.generate([5], max_new_tokens=1)
    if row["ground_truth"] == "block":
        time.sleep(600)  # noqa: ASYNC251 - that is what is tested
    await asyncio.sleep(600)
    return 0.0


async def steps(row: dict[str, Any], client: Client) -> float:
    """One row has a step that blocks the loop that all share, once, for as long as it says."""
    await client.generate([5], max_new_tokens=1)
    if row["ground_truth"] and not stuttered:
        stuttered.append(True)
        time.sleep(float(row["ground_truth"]))  # noqa: ASYNC251 - that is what is tested
    await asyncio.sleep(1.5)
    return 1.0


async def stumbles(row: dict[str, Any], client: Client) -> float:
    """The first episode of the process fails."""
    await client.generate([5], max_new_tokens=1)
    if not stuttered:
        stuttered.append(True)
        raise KeyError("once")
    return 1.0


async def stutters(row: dict[str, Any], client: Client) -> float:
    """In a task of its own, as tools are."""
    await client.generate([5], max_new_tokens=1)

    async def tool() -> None:
        if not stuttered:
            stuttered.append(True)
            time.sleep(1.3)  # noqa: ASYNC251

    await asyncio.gather(tool())
    await client.generate([5], max_new_tokens=1)
    return 1.0


async def dies_where_told(row: dict[str, Any], client: Client) -> float:
    """Ends the process of all for one row."""
    await client.generate([5], max_new_tokens=1)
    await asyncio.sleep(0.3)
    if row["ground_truth"] == "die":
        os._exit(3)
    return 1.0


async def cleans_up(row: dict[str, Any], client: Client, *, sleep_s: float, clean_up_s: float) -> float:
    """One row has a long way to its end, once it is called off, and asks for a turn there."""
    if not row["ground_truth"]:
        await client.generate([5], max_new_tokens=1)
        await asyncio.sleep(sleep_s)
        return 1.0
    try:
        await client.generate([5], max_new_tokens=1)
        await asyncio.sleep(600)
    finally:
        with contextlib.suppress(ValueError):
            await client.generate([6], max_new_tokens=1)
        await asyncio.sleep(clean_up_s)
        with open(row["ground_truth"], "a") as marks:  # noqa: ASYNC230 - a mark for the test
            marks.write("clean\n")
    return 0.0


async def goes_wrong(row: dict[str, Any], client: Client) -> float | Trajectory | None:
    """In the way that the row says."""
    match row["ground_truth"]:
        case "room":
            await client.generate([5] * 100)
        case "turn":
            await client.generate([5], max_new_tokens=1)
            return Trajectory(reward=1.0, leave_out=[-1])
        case "wait" | "late" as when:
            turn = await client.generate([5], max_new_tokens=1)
            waiting = asyncio.create_task(client.generate([*turn.ids, 7]))
            await asyncio.sleep(0)
            time.sleep(0.3 * (when == "late"))  # noqa: ASYNC251 - it is answered before this process calls it off
            waiting.cancel()
            await asyncio.sleep(0.1)
            return 1.0
        case "forge":
            client._send(["done", client._episode])
            await asyncio.sleep(600)
    await client.generate([5])
    return None


async def thinks(row: dict[str, Any], client: Client, *, sleep_s: float) -> float:
    """For longer than a process has to cancel an episode."""
    turn = await client.generate([5], max_new_tokens=2)
    await asyncio.sleep(sleep_s)
    await client.generate([*turn.ids, 7], max_new_tokens=2)
    return 1.0


async def two_at_once(row: dict[str, Any], client: Client, *, sleep_s: float) -> float:
    """What it does after each turn is short enough."""
    for _ in range(2):
        await asyncio.gather(client.generate([5], max_new_tokens=2), client.generate([6], max_new_tokens=2))
        await asyncio.sleep(sleep_s)
    return 1.0


def not_asynchronous(row: dict[str, Any], client: Client) -> float:
    return 1.0


async def about_a_picture(row: dict[str, Any], client: Client) -> float:
    """Two turns about the row's picture, and a context of text beside them."""
    messages = list(row["prompt"])
    turn = await client.generate(messages, max_new_tokens=4)
    asked = {"role": "user", "content": "which colour ?"}
    await client.generate([*messages, turn.message, asked], max_new_tokens=4)
    await client.generate([asked], max_new_tokens=4)
    return float(client.seed % 7)


async def shows_another(row: dict[str, Any], client: Client) -> float:
    """A picture that the row has not, after the first answer."""
    turn = await client.generate(row["prompt"], max_new_tokens=2)
    asked = {"role": "user", "content": [{"type": "image"}]}
    await client.generate([*row["prompt"], turn.message, asked], max_new_tokens=2)
    return 0.0


async def lingers(row: dict[str, Any], client: Client) -> float:
    """For as long as the row says."""
    await client.generate([5], max_new_tokens=1)
    await asyncio.sleep(float(row["ground_truth"]))
    return 1.0


async def long_contexts(row: dict[str, Any], client: Client, *, tokens: int) -> float:
    """So many turns of one conversation, from a long context on."""
    by_ids = row["prompt"] == "ids"
    context: Any = (
        list(range(2, 250)) * (tokens // 248) if by_ids else [{"role": "user", "content": "ab a" * (tokens // 2)}]
    )
    for _ in range(row["turns"]):
        turn = await client.generate(context, max_new_tokens=64)
        context = [*turn.ids, 8] if by_ids else [*context, turn.message, {"role": "tool", "content": "ba"}]
    return 1.0
