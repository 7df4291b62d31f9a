"""`python openenv_stand_in.py [PLACES]`: the same game in OpenEnv's messages, without its package; prints its port.

`reset` with a `fault` makes it break the protocol in that way; with `graded`, wrong answers differ in their rewards.
"""

import asyncio
import json
import sys

from aiohttp import WSMsgType, web

PLACES = int(sys.argv[1]) if len(sys.argv) > 1 else 2
TEXT = {"type": "string"}
ACTION = {"type": "object", "properties": {"metadata": {"type": "object"}, "message": TEXT}, "required": ["message"]}
taken = 0


def hint(message: str, reward: float | None, done: bool) -> dict[str, object]:
    observation = {"message": message, "metadata": {}}
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


FAULTS: dict[str, object] = {
    "error": {"type": "error", "data": {"message": "no such game", "code": "EXECUTION_ERROR"}},
    "list": ["observation"],
    "observation": {"type": "observation", "data": {"observation": "a text", "reward": None, "done": False}},
}


async def play(request: web.Request) -> web.WebSocketResponse:
    global taken
    ws = web.WebSocketResponse()
    await ws.prepare(request)
    if taken >= PLACES:
        await ws.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
        await ws.close()
        return ws
    taken += 1
    try:
        secret, steps, graded = 0, 0, False
        async for message in ws:
            asked = json.loads(message.data) if message.type is WSMsgType.TEXT else {"type": "close"}
            data = asked.get("data", {})
            if asked["type"] == "close":
                break
            if (fault := data.get("fault")) == "end":
                break
            if fault == "silent":
                await asyncio.sleep(2)  # longer than the test waits; then its place is free again
            if fault == "text":
                await ws.send_str("no JSON")
            elif fault is not None:
                await ws.send_json(FAULTS[fault])
            elif asked["type"] == "reset":
                most = data.get("most", 9)
                secret, steps, graded = data["seed"] % most + 1, 0, data.get("graded", False)
                await ws.send_json(hint(f"Guess a number from 1 to {most}.", None, False))
            else:
                assert set(data) == {"message"}, data
                steps += 1
                guess = int(data["message"]) if data["message"].isdigit() else 0
                words = "higher" if guess < secret else "lower"
                right = guess == secret
                wrong = sum(map(ord, data["message"])) % 7 / 10 if graded else -0.1
                await ws.send_json(hint("right" if right else words, 1.0 if right else wrong, right or steps >= 3))
    finally:
        taken -= 1
    return ws


async def schema(request: web.Request) -> web.Response:
    return web.json_response({"action": ACTION, "observation": {}, "state": {}})


async def main() -> None:
    app = web.Application()
    app.add_routes([web.get("/ws", play), web.get("/schema", schema)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the test lets go


if __name__ == "__main__":
    asyncio.run(main())
