"""Attacks one target in a process of its own: `python -m tests.security.fuzz.worker --target T --frames N --seed S`.

Its last line is JSON: frames, messages, accepted (messages that their reader found whole), resealed (share of the
mutated ones with a right checksum), unhandled (a list), rss_growth_bytes, cpu_s.
"""

import argparse
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
from pathlib import Path
from typing import Any

from replay.channel.frames import encode
from tests.security.fuzz.mutations import Mutator
from tests.security.fuzz.samples import Samples
from tests.security.fuzz.targets import RUN, Target

TARGETS = {
    "replay": "tests.security.fuzz.targets:ReplayTarget",
    "rollout": "tests.security.fuzz.rollout:RolloutTarget",
    "learner": "tests.security.fuzz.rank:LearnerTarget",
    "publisher": "tests.security.fuzz.bus:PublisherTarget",
    "subscriber": "tests.security.fuzz.bus:SubscriberTarget",
}
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
    """One target, one seed."""

    def __init__(self, name: str, seed: int) -> None:
        module, _, kind = TARGETS[name].partition(":")
        self._make: type[Any] = getattr(importlib.import_module(module), kind)
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
                self._note(error, batch)
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

    def _note(self, error: BaseException, batch: list[list[bytes]]) -> None:
        if len(self.unhandled) < REPORTED:
            text = "".join(traceback.format_exception(error))
            self.unhandled.append(
                {"error": repr(error)[:300], "traceback": text[-3000:], "batch": self.messages // BATCH}
            )
            sys.stderr.write(f"unhandled: {text}\n")

    def result(self) -> dict[str, Any]:
        """What the last line says."""
        return {
            "frames": self.frames,
            "messages": self.messages,
            "accepted": self._accepted,
            "resealed": round(self._mutator.resealed / max(1, self._mutator.mutated), 3),
            "unhandled": self.unhandled,
            "rss_growth_bytes": self.grown,
            "cpu_s": round(sum(os.times()[:2]), 1),
        }


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m tests.security.fuzz.worker", description=__doc__)
    parser.add_argument("--target", choices=sorted(TARGETS), required=True)
    parser.add_argument("--frames", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    logging.basicConfig(level=logging.DEBUG, handlers=[Formatted()], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    attack = Attack(args.target, args.seed)
    asyncio.run(attack.run(args.frames))
    sys.stdout.write(json.dumps(attack.result()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
