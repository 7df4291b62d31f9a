"""Has the hint about the split made beside a run, by a process of its own with the lowest priority."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from configs.auto import on_gpus
from configs.schema import Config
from replay.lifeline import PARENT

log = logging.getLogger(__name__)

FIRST = 40
"""Step of the first hint; the next ones come at twice that, four times ..."""
MOST_DEVICES, MOST_TRAJECTORIES = 64, 4096
"""Larger runs take too long; `python -m learner.plan` is for them."""
DEADLINE_S = 300.0


class SplitHint:
    """The newest hint, for every row; learner/plan/hint.py makes it. For rank 0.

    There is none on a CPU, where all processes share the cores, and none over several nodes.
    """

    def __init__(self, config: Config) -> None:
        placement = config.placement
        one_host = placement.rollout is None and placement.local_rollouts and not placement.share_gpus
        devices = config.num_rollout_devices + config.num_learner_ranks
        small = 2 < devices <= MOST_DEVICES and config.trajectories_per_step <= MOST_TRAJECTORIES
        self._applies = one_host and small and on_gpus(placement.model_dump())
        self._run_dir = Path(config.run_dir)
        self._next = FIRST
        self._process: subprocess.Popen[str] | None = None
        self._until = 0.0
        self._found: dict[str, float] = {}

    def take(self, step: int) -> dict[str, float]:
        """Numbers of the newest hint for the row, or nothing; where one is due, has it made from the rows so far."""
        if self._process is not None and (self._process.poll() is not None or time.monotonic() > self._until):
            self._found = self._read(self._process)
            self._process = None
        if self._applies and self._process is None and step >= self._next:
            self._next = max(2 * self._next, step + 1)
            self._until = time.monotonic() + DEADLINE_S
            self._process = subprocess.Popen(
                [sys.executable, "-m", "learner.plan.hint", str(self._run_dir)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=os.environ | {PARENT: str(os.getpid())},
            )  # fmt: skip
        return self._found

    def close(self) -> None:
        """End one that is being made."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read(self, process: "subprocess.Popen[str]") -> dict[str, float]:
        process.kill()  # nothing, once it has ended
        said, problem = process.communicate()
        if process.returncode != 0:
            why = problem.strip().rpartition("\n")[2] or f"not made within {DEADLINE_S:.0f} s"
            log.info("split hint: %s", why)
            return {}
        found: dict[str, float] = json.loads(said)
        return found
