"""Which step of a benchmark run belongs to which phase. Imports no torch."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Phase = Literal["warmup", "idle", "full"]
FILE = "bench_plan.json"
RESULT = "bench_learner.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps of each phase, in this order. A measured phase runs one step more: its first only refills the pipeline.

    Example: Plan(warmup=2, idle=3, full=3, train=3, quiet_s=60) has 10 steps; steps 4 to 6 give T_roll, 8 to 10
    T_step, and after step 10 four updates on the batches of 8 to 10, without rollouts, give T_train.
    """

    warmup: int
    """Whole steps that nobody counts."""
    idle: int
    """Counted steps in which the update is left out: T_roll."""
    full: int
    """Counted steps as a run makes them: T_step."""
    train: int
    """Counted updates on batches that are already here: T_train."""
    quiet_s: float
    """How long the engines have to finish what they hold before the updates are timed."""

    @property
    def total_steps(self) -> int:
        """Steps of the run."""
        return self.warmup + self._length(self.idle) + self._length(self.full)

    def phase(self, step: int) -> Phase:
        """The phase of a step, counted from 1."""
        if step <= self.warmup:
            return "warmup"
        return "idle" if step <= self.warmup + self._length(self.idle) else "full"

    def measured(self, phase: Phase) -> Iterator[int]:
        """Steps of a phase that count."""
        steps = [step for step in range(1, self.total_steps + 1) if self.phase(step) == phase]
        yield from steps[1:]

    def write(self, run_dir: Path) -> None:
        """Leave the plan where the learner ranks look for it."""
        (run_dir / FILE).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, run_dir: Path) -> "Plan":
        """The plan of a run. Raises FileNotFoundError in the folder of any other run."""
        return cls(**json.loads((run_dir / FILE).read_text(encoding="utf-8")))

    @staticmethod
    def _length(counted: int) -> int:
        return counted + 1 if counted else 0
