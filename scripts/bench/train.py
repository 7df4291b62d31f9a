"""`python -m scripts.bench.train`: one learner rank that runs the phases of the pipeline benchmark.

The loop is that of learner/train.py, and so are replay, the rollout servers and the weight bus. Only the steps of
the idle phase leave the update out. After the last step the updates are made once more from batches in memory, while
the engines stand still; nothing of that is committed or published.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from configs.schema import Config
from learner.batches import BatchReader
from learner.learner import Learner
from learner.ranks import Ranks
from learner.step import StepSums
from learner.train import main
from learner.trainer import Update
from replay import messages as m
from scripts.bench.broadcast import device_time, largest, together
from scripts.bench.core import write_json

Phase = Literal["warmup", "idle", "full"]
PLAN = "bench_plan.json"
RESULT = "bench_learner.json"
ALONE_REPEATS = 3
LOOK_S = 0.2
NOTHING = Update(StepSums(Counter(), 0), np.zeros(1, np.float32), lr=0.0, reason="left out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps of each phase, in this order. A measured phase runs one step more: its first only refills the pipeline.

    Example: Plan(warmup=2, idle=3, full=3, quiet_s=60) has 10 steps; steps 4 to 6 give T_roll, 8 to 10 T_step, and
    after step 10 four updates on the batches of 8 to 10, without rollouts, give T_train.
    """

    warmup: int  # whole steps that are not counted
    idle: int  # counted steps in which the update is left out: T_roll
    full: int  # counted steps as a run makes them: T_step; afterwards as many updates on their batches: T_train
    quiet_s: float  # how long the engines have to finish what they hold before the updates are timed

    @property
    def phases(self) -> list[Phase]:
        lengths: dict[Phase, int] = {"warmup": self.warmup, "idle": self.idle + 1, "full": self.full + 1}
        return [phase for phase, length in lengths.items() for _ in range(length)]

    @property
    def total_steps(self) -> int:
        return len(self.phases)

    def measured(self, phase: Phase) -> list[int]:
        """Steps of a phase that count."""
        return [step for step, its in enumerate(self.phases, 1) if its == phase][1:]


@dataclass(frozen=True, slots=True)
class Finished:
    """A run that made all its steps."""

    options: argparse.Namespace
    config: Config
    plan: Plan
    watcher: Any
    learner: Mapping[str, Any]  # what the learner ranks wrote
    seconds: float


class BenchLearner(Learner):
    """A learner that leaves updates out where the plan says so, and notes when each step was committed."""

    def __init__(self, config: Config, ranks: Ranks, batches: BatchReader) -> None:
        super().__init__(config, ranks, batches)
        self.plan = Plan(**json.loads((Path(config.run_dir) / PLAN).read_text(encoding="utf-8")))
        self.kept: list[m.Batch] = []
        self.result: dict[str, Any] = {"committed_at": {}, "trained": {}, "memory": {}, "nccl": None}
        if ranks.device.type == "cuda":
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            self.result |= {"gpu": torch.cuda.get_device_name(ranks.device), "nccl": ".".join(map(str, version))}

    def update(self, batch: m.Batch) -> Update:
        """The update, or nothing in the idle phase. The batches that count towards T_step are kept."""
        if self.plan.phases[batch.step - 1] == "idle":
            return NOTHING
        if batch.step in self.plan.measured("full"):
            self.kept.append(batch)
        return super().update(batch)

    def commit(self, batch: m.Batch) -> str:
        """As always, with the time of it: the digests lie between the update and the gather."""
        with self.span("commit"):
            digest = super().commit(batch)
        self.result["committed_at"][batch.step] = time.monotonic()
        return digest

    def checkpoint_if_due(self, batch: m.Batch) -> None:
        """No checkpoint; after the last step come the measurements without rollouts."""
        if batch.step == self.plan.total_steps:
            self.wait_for_broadcast()
            if self.ranks.is_first:
                self.result["quiet"] = self._becomes_quiet()
            self._measure_updates()
            self._measure_parts()

    def finish(self, version: int) -> None:
        super().finish(version)
        if self.ranks.device.type == "cuda":
            # of the fullest rank; the allocator gives nothing back by itself, so at the end this is its peak
            reserved = largest(float(torch.cuda.memory_reserved(self.ranks.device)), self.ranks.device)
            self.result["memory"] = {"learner_reserved_gb": reserved / 1e9}
        if self.ranks.is_first:
            write_json(Path(self.config.run_dir) / RESULT, self.result)

    def _becomes_quiet(self) -> bool:
        """Whether, in time, no lease is out and there is no room for one: the engines have nothing to do."""
        deadline = time.monotonic() + self.plan.quiet_s
        while time.monotonic() < deadline:
            groups = self.batches._ask(m.StatusRequest(), m.Status, "its status").state["groups"]
            if groups["leased"] == 0 and groups["buffered"] + groups["taken"] >= groups["max"]:
                return True
            time.sleep(LOOK_S)
        return False

    def _measure_updates(self) -> None:
        """The same batches as in the full phase; the first one twice, because the first update is not counted."""
        seconds = []
        for batch in [self.kept[0], *self.kept]:
            started = together(self.ranks.device)
            super().update(batch)
            seconds.append(device_time(self.ranks.device) - started)
        self.result["trained"] = {"seconds": seconds[1:], "steps": [batch.step for batch in self.kept]}

    def _measure_parts(self) -> None:
        """Parts of a publication by themselves: the gather of all tensors, and the digests of the shards."""
        parts: dict[str, list[float]] = {"gather": [], "digest": []}
        for _ in range(ALONE_REPEATS):
            started = together(self.ranks.device)
            for _ in self.policy.named_full_tensors(self.config.rollout.dtype):
                pass
            gathered = device_time(self.ranks.device)
            self.bus.digests()
            parts["gather"].append(gathered - started)
            parts["digest"].append(device_time(self.ranks.device) - gathered)
        self.result["alone"] = parts


if __name__ == "__main__":
    main(BenchLearner)
