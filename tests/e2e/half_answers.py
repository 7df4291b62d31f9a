"""A rollout server that comes to stand still with half answers: `python -m tests.e2e.half_answers FILE ARGUMENTS`.

No token ends an answer: those of the first GROUPS have SHORT tokens here, all others LONG. The latter stop at OLD
tokens until version 1 is there. Once ANSWERS run, each with HALF tokens, FILE gets all of them, and no other token
comes. With `-` for FILE all have LONG tokens, and it goes on as servers do.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replay import messages as m
from rollout_server import main as rollout_main
from rollout_server.engines import Completion
from rollout_server.engines.torch.lane import DecodeLane
from rollout_server.generate import Generator
from rollout_server.progress import prefixes_of
from rollout_server.tasks.pictures import Prompt

GROUPS, SIZE, SHORT, HALF, OLD, LONG = 4, 8, 4, 6, 10, 24
ANSWERS = 2 * GROUPS * SIZE


class Lengths(Generator):
    short = 0
    """So many groups more have SHORT answers."""

    async def sample(self, prompt: Prompt, lease: m.Lease, request_id: str) -> list[Completion]:
        length, Lengths.short = (SHORT, Lengths.short - 1) if Lengths.short else (LONG, 0)
        sampling = replace(self.sampling(lease.seed), stop_token_ids=(), max_new_tokens=length)
        given = {"prefixes": prefixes_of(lease, SIZE)}
        return await self._stopped(prompt, sampling, SIZE, request_id, **given)


class Halting(DecodeLane):
    file: Path

    def step(self, *, may_admit: bool) -> None:
        counts = [count for _, count in self.rows.produced()]
        if self.version == 0:
            stands = max(counts, default=0) >= OLD
        else:
            stands = len(counts) + len(self.rows.waiting) < ANSWERS
        if len(counts) == ANSWERS and min(counts) >= HALF:
            stands = True
            if not self.file.exists():
                self._tell()
        if stands:
            time.sleep(0.01)
        else:
            super().step(may_admit=may_admit)

    def _tell(self) -> None:
        told: dict[str, Sequence[Any]] = {}
        for request in {answer.request.request_id: answer.request for answer in self.rows.answers}.values():
            parts = self.rows.progress(request, [0] * SIZE)
            told[request.request_id] = [[p.token_ids.tolist(), p.logprobs.tolist(), p.versions.tolist()] for p in parts]
        beside = self.file.with_suffix(".new")
        beside.write_text(json.dumps(told))
        beside.replace(self.file)


if __name__ == "__main__":
    if sys.argv[1] != "-":
        from rollout_server.engines.torch import engine

        Halting.file, Lengths.short = Path(sys.argv[1]), GROUPS
        engine.DecodeLane = Halting  # type: ignore[misc]
    sys.argv = ["rollout_server", *sys.argv[2:]]
    sys.exit(rollout_main.main(parts=rollout_main.Parts(generator=Lengths)))
