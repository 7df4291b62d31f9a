"""Attacks one target in a process of its own; its last line is the result as JSON."""

import asyncio
import importlib
import json
import logging
import os
import random
import resource
import sys
import time
import traceback
from typing import Any

from replay.channel.frames import encode
from tests.security.fuzz.mutations import Mutator
from tests.security.fuzz.samples import Samples
from tests.security.fuzz.targets import RUN, Target
from tests.security.served_replay import resident_bytes

TARGETS = {
    "replay": "targets",
    "rollout": "ends",
    "learner": "ends",
    "publisher": "bus",
    "subscriber": "bus",
}
"""Kinds of socket, and the module that has each: one process imports only its own."""
BATCH = 64
WARM = 0.2
"""Share of the frames after which memory is looked at for the first time."""
REPORTED = 20
ADDRESS_BYTES = 16 << 30
"""What a message makes its reader ask for above this is an error here, not the end of the machine."""
OLD_NUMBERS = 0.02
"""Share of messages with a number that came before."""


class Formatted(logging.Handler):
    """Formats every line, as a log file would, and keeps none. A line that cannot be formatted is an error."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()


class Attack:
    def __init__(self, name: str, seed: int) -> None:
        module = importlib.import_module(f"tests.security.fuzz.{TARGETS[name]}")
        self._make: type[Any] = getattr(module, f"{name.title()}Target")
        self._rng = random.Random(f"{seed}/{name}")
        self._mutator = Mutator(self._rng)
        self._number = time.time_ns() // 1000  # above what the target's own peers have used
        self.frames = self.messages = 0
        self.unhandled: list[dict[str, Any]] = []
        self.grown = 0
        self._accepted = 0

    async def run(self, frames: int) -> None:
        """Send that many frames, and see that the target outlives them."""
        target = await self._open()
        resting = before = 0
        while self.frames < frames:
            batch = [self._next(target) for _ in range(BATCH)]
            try:
                for message in batch:
                    target.send(message)
                await target.drain(len(batch))
            except Exception as error:  # noqa: BLE001 - this is what is looked for
                self._note(error)
                target.close()
                target, before = await self._open(), 0
            self._accepted, before = self._accepted + target.accepted - before, target.accepted
            self.messages += len(batch)
            self.frames += sum(map(len, batch))
            if self.frames > WARM * frames:
                resting = resting or resident_bytes()
                self.grown = max(self.grown, resident_bytes() - resting)
        target.close()

    async def _open(self) -> Target:
        target: Target = self._make()
        await target.open()
        self._samples = Samples(target.kinds, self._rng, target.given)
        return target

    def _next(self, target: Target) -> list[bytes]:
        self._number += 1
        old = self._rng.random() < OLD_NUMBERS
        number = self._number - self._rng.choice((1, 1000, 10**6)) if old else self._number
        run = RUN if self._rng.random() < 0.98 else self._rng.choice(("", "another"))
        return self._mutator.mutate([bytes(frame) for frame in encode(self._samples.any(), run, number)])

    def _note(self, error: BaseException) -> None:
        if len(self.unhandled) < REPORTED:
            text = "".join(traceback.format_exception(error))[-3000:]
            self.unhandled.append({"error": repr(error)[:300], "traceback": text, "batch": self.messages // BATCH})

    def result(self) -> dict[str, Any]:
        """Accepted are messages that their reader found whole; resealed is the share of changed ones made whole."""
        return {
            "frames": self.frames,
            "messages": self.messages,
            "accepted": self._accepted,
            "resealed": round(self._mutator.resealed / max(1, self._mutator.mutated), 3),
            "unhandled": self.unhandled,
            "rss_growth_bytes": self.grown,
            "cpu_s": round(sum(os.times()[:2]), 1),
        }


def main() -> None:
    target, frames, seed = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    logging.basicConfig(level=logging.DEBUG, handlers=[Formatted()], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    attack = Attack(target, int(seed))
    asyncio.run(attack.run(int(frames)))
    print(json.dumps(attack.result()))


if __name__ == "__main__":
    main()
