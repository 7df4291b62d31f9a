"""Mutated messages stop nobody: each kind of socket of a run, with the code that reads it behind it.

Valid messages of every kind are changed (bits, lengths, frames, values, numbers, nesting, dtypes), at least half of
them with the right checksum for what they became. The same seed makes the same messages. A long attack:
`SLIPSTREAM_FUZZ_FRAMES=1000000 pytest tests/security/test_fuzz.py`.
"""

import asyncio
import logging
import os
import random
import time

import pytest

from replay.channel.frames import encode
from tests.security.fuzz.bus import PublisherTarget, SubscriberTarget
from tests.security.fuzz.ends import LearnerTarget, RolloutTarget
from tests.security.fuzz.mutations import Mutator
from tests.security.fuzz.samples import Samples
from tests.security.fuzz.targets import RUN, ReplayTarget, Target
from tests.security.served_replay import resident_bytes

TARGETS = (ReplayTarget, RolloutTarget, LearnerTarget, PublisherTarget, SubscriberTarget)
FRAMES = int(os.environ.get("SLIPSTREAM_FUZZ_FRAMES", "4000"))
CAP_BYTES = 64 * 1024 * 1024
BATCH = 64
WARM = 0.2
"""Share of the frames after which memory is looked at for the first time."""
OLD_NUMBERS = 0.02
"""Share of messages with a number that came before."""


class Attack:
    def __init__(self, make: type[Target], seed: int) -> None:
        self._make, self._rng = make, random.Random(f"{seed}/{make.__name__}")
        self._number = time.time_ns() // 1000  # above what the target's own peers have used
        self.mutator = Mutator(self._rng)
        self.frames = self.messages = self.accepted = self.grown = 0
        """`accepted` are messages that their reader found whole."""
        self.unhandled: list[Exception] = []

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
                self.unhandled.append(error)
                target.close()
                target, before = await self._open(), 0
            self.accepted, before = self.accepted + target.accepted - before, target.accepted
            self.messages += len(batch)
            self.frames += sum(map(len, batch))
            if self.frames > WARM * frames:
                resting = resting or resident_bytes()
                self.grown = max(self.grown, resident_bytes() - resting)
        target.close()

    async def _open(self) -> Target:
        target = self._make()
        await target.open()
        self._samples = Samples(target.kinds, self._rng, target.given)
        return target

    def _next(self, target: Target) -> list[bytes]:
        self._number += 1
        old = self._rng.random() < OLD_NUMBERS
        number = self._number - self._rng.choice((1, 1000, 10**6)) if old else self._number
        run = RUN if self._rng.random() < 0.98 else self._rng.choice(("", "another"))
        return self.mutator.mutate([bytes(frame) for frame in encode(self._samples.any(), run, number)])


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_messages_stop_nobody(target: type[Target], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)  # every line must have a text
    attack = Attack(target, 7)
    asyncio.run(attack.run(FRAMES))
    assert attack.unhandled == [] and attack.grown <= CAP_BYTES
    assert attack.mutator.resealed >= 0.5 * attack.mutator.mutated
    assert attack.accepted > 0.05 * attack.messages, "hardly any message gets past the checks"
