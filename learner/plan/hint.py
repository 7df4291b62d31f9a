"""The hint in a live run: a side that idles, and the split of the same devices that would be faster.

`python -m learner.plan.hint RUN` makes one from the newest rows of metrics.jsonl and prints it as JSON; rank 0 has it
made beside the run (learner/report/split_hint.py). Empty where nothing is to be gained or the simulation is off.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from configs import loading
from configs.base import ConfigError
from configs.schema import Config
from learner.plan import fitting, sources
from learner.plan.advice import Effort, Plan, advise
from learner.report.metrics import FILE, MetricsError, read_rows
from replay.lifeline import PARENT, die_with_parent

Row = Mapping[str, Any]
WINDOW = 40
"""Steps that a hint looks at."""
IDLE, GAIN = 0.2, 1.1
"""A side that idles for less says nothing, and so does a split that is hardly faster."""
TRUE = 0.15
"""The simulation of the present split must be as near to what it takes, or nothing is said."""
NEEDED = (
    "time", "rollout/idle_ratio", "timing_s/update_actor", "prompt_length/mean", "response_length/mean",
    "response_length/max", "perf/total_num_tokens",
)  # fmt: skip
"""Numbers without one of which in every row there is no hint."""
STEPS = 6


def hint(config: Config, rows: Sequence[Row]) -> dict[str, float]:
    """Numbers of the row: gain, devices of the faster split, and how idle the side is that would give some; or empty.

    Raises ConfigError: nothing follows from the times in the rows.
    """
    if any(row.get(name) is None for row in rows for name in NEEDED):
        return {}
    measured = sources.measured("this run", config, rows)
    busy, step = measured.busy_s, measured.step_s
    if busy is None or not step:
        return {}
    idle = {"rollout": 1 - busy / step, "learner": max(0.0, 1 - measured.train_s / step)}
    side = max(idle, key=lambda name: idle[name])
    if idle[side] < IDLE:
        return {}
    fitted = fitting.fit([measured], quick=True)
    tp, gpus = config.placement.tensor_parallel, config.num_rollout_devices + config.num_learner_ranks
    candidates = [
        Plan(rollout=r, learner=gpus - r, lag=config.replay.async_lag, tensor_parallel=tp)
        for r in _near(config.num_rollout_devices, gpus, tp)
        if (gpus - r) % config.learner.mesh.tensor == 0
    ]
    found = advise(config, fitted, candidates, effort=Effort(steps=STEPS, etas=0))
    now = next(each for each in found if each.plan.rollout == config.num_rollout_devices)
    best, gain = found[0].plan, now.step_s / found[0].step_s
    gives = "rollout" if best.rollout < config.num_rollout_devices else "learner"
    if gain < GAIN or abs(now.step_s / step - 1) > TRUE:
        return {}
    return {
        "perf/split_gain": gain,
        "perf/split_rollout": float(best.rollout),
        "perf/split_learner": float(best.learner),
        {"rollout": "perf/split_rollout_idle", "learner": "perf/split_learner_idle"}[gives]: idle[gives],
    }


def _near(rollout: int, gpus: int, tp: int) -> list[int]:
    """Rollout devices of the present split and of up to eight others, the nearest ones.

    Half as many or twice as many at most: what one engine does with other batches is the least certain of all.
    """
    possible = [r for r in range(tp, gpus, tp) if rollout <= 2 * r <= 4 * rollout]
    return sorted(possible, key=lambda r: abs(r - rollout))[:9]


def main() -> int:
    """Entry point: the folder of a run that goes on, its hint on stdout as JSON; exit code 2: none can be made."""
    die_with_parent(int(os.environ.get(PARENT, os.getppid())))
    os.nice(19)
    folder = Path(sys.argv[1])
    try:
        config = loading.load(str(folder / "config.yaml"))
        rows = [row for row in read_rows(folder / FILE) if "step" in row]
        sys.stdout.write(json.dumps(hint(config, rows[-WINDOW:])) + "\n")
    except (ConfigError, MetricsError, OSError) as error:
        sys.stderr.write(f"no hint about the split: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
