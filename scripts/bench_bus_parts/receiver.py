"""`python -m scripts.bench_bus_parts.receiver`: an engine that answers without end and follows the weight bus.

It stamps the moments at which running answers get tokens, and writes one line of JSON for each version that it went
live with: the pause is the longest gap between tokens around it.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from pathlib import Path

from configs.loading import add_arguments, from_arguments
from configs.schema import Config
from replay.lifeline import die_with_parent, set_up_logging
from rollout_server.engines import Sampling
from rollout_server.follower import WeightFollower
from scripts.bench.server import make_engine

RUN = "bench-bus"
LOOK_S = 0.001
AROUND_S = 0.1
PROMPT = [3, 4, 5, 6]


class Receiver:
    """One engine under load."""

    def __init__(self, config: Config, name: str, out: Path, requests: int) -> None:
        self.config, self.name, self.out, self.requests = config, name, out, requests
        self.engine = make_engine(config)
        self.stamps: list[float] = []
        self.first_live = asyncio.Event()
        self.follower = WeightFollower(config, self.engine, name, on_live=self._live, on_quarantine=self._dark)

    async def run(self, address: str) -> None:
        """Until the publisher says goodbye."""
        self.follower.follow(address, RUN)
        async with asyncio.TaskGroup() as tasks:
            work = [tasks.create_task(self._answer(number)) for number in range(self.requests)]
            work.append(tasks.create_task(self._look()))
            thread = self.follower._thread
            assert thread is not None
            await asyncio.to_thread(thread.join)  # it ends with the publisher's goodbye
            for task in work:
                task.cancel()
        await self.engine.close()

    async def _answer(self, number: int) -> None:
        sampling = Sampling(max_new_tokens=self.config.rollout.max_new_tokens, stop_token_ids=())
        await self.first_live.wait()
        for again in range(1_000_000):
            await self.engine.generate(PROMPT, sampling, 1, request_id=f"{number}/{again}")

    async def _look(self) -> None:
        """Stamp each growth of the running answers."""
        before: dict[str, int] = {}
        while True:
            now = dict(self.engine.running_tokens())
            if any(count > before.get(name, 0) for name, count in now.items()):
                self.stamps.append(time.monotonic())
            before = now
            await asyncio.sleep(LOOK_S)

    async def _live(self, version: int, _: int) -> None:
        self.first_live.set()
        asyncio.get_running_loop().create_task(self._note(version, time.monotonic()))

    async def _note(self, version: int, live_at: float) -> None:
        pause, pausing = self.follower.gauges["pause_s"], self.follower.gauges["pausing_s"]
        await asyncio.sleep(AROUND_S)
        detail = (await self.engine.health()).detail
        gaps = [(b - a, a, b) for a, b in zip(self.stamps, self.stamps[1:], strict=False)]
        around = [gap for gap, a, b in gaps if b > live_at - pause and a < live_at + AROUND_S]
        usual = statistics.median(gap for gap, _, _ in gaps) if gaps else 0.0
        row = {
            "name": self.name,
            "version": version,
            "paused_s": pause,
            "pausing_s": pausing,
            **{name: seconds for name, seconds in detail.items() if name.startswith("apply_")},
            "gap_s": max(around, default=0.0),
            "usual_gap_s": usual,
        }
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    async def _dark(self, reason: str) -> None:
        raise RuntimeError(reason)


async def serve(config: Config, args: argparse.Namespace) -> None:
    """The engine's loop is this one."""
    await Receiver(config, args.name, args.out, args.requests).run(args.address)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_bus_parts.receiver", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--address", required=True)
    parser.add_argument("--server", dest="name", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = from_arguments(args)
    set_up_logging(args.name, None)
    asyncio.run(serve(config, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
