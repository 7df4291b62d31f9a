"""Between the rollout server and an environment process, in frames (workers/frames.py).

| from    | message                                                                                        |
|---------|------------------------------------------------------------------------------------------------|
| server  | first: {"function": str, "options": {...}, "temperature": float, "turn_timeout_s": float}      |
| process | first: {"ready": true} or {"error": str}                                                       |
| server  | ["start", episode, row, seed, prompt_seed], ["cancel", episode],                               |
|         | ["answer", episode, call, value],                                                              |
|         | ["over", episode, call, text, kind]                                                            |
| process | ["ask", episode, call, what, arguments]: `turn`, or {"given": ...} to `encode`, `decode`, `pieces`  |
| process | ["leave", episode, call]: the function does not wait for it any more                           |
| process | ["cancelling", episode]: it has seen `cancel`, and the function cleans up                      |
| process | ["done", episode, outcome], ["failed", episode, text], ["cancelled", episode]                  |

Code of the user shares the process and may have written its messages: the server checks them.
"""

import math
from collections.abc import Mapping
from typing import Any

from rollout_server.tasks.environments import ContextFull, EpisodeOver, NoMoreTurns
from rollout_server.tasks.workers.frames import MAX_METRICS
from rollout_server.tasks.workers.frames import shown as shown

MAX_BYTES = 32 * 1024 * 1024
MAX_ITEMS = 1 << 20
OVER: dict[str, type[EpisodeOver]] = {"context": ContextFull, "turns": NoMoreTurns}
LIMITS = {"max_array_len": MAX_ITEMS, "max_map_len": MAX_ITEMS, "max_bin_len": MAX_BYTES, "max_ext_len": 0}


def read_outcome(said: Any) -> dict[str, Any]:
    """The checked fields of `done`. Raises ValueError, for the user to read."""
    if not isinstance(said, dict):
        raise ValueError(f"an outcome {shown(said)}")
    reward, metrics, leave_out = said.get("reward"), said.get("metrics"), said.get("leave_out")
    if reward is not None and not _is_finite(reward):
        raise ValueError(f"the reward {shown(reward)} is not a finite number")
    if not isinstance(metrics, Mapping) or len(metrics) > MAX_METRICS:
        raise ValueError(f"the metrics {shown(metrics)}; a mapping of at most {MAX_METRICS} names to numbers")
    for name, value in metrics.items():
        if not isinstance(name, str) or not _is_finite(value):
            raise ValueError(f"the metric {shown(name)} = {shown(value)} is not a finite number")
    if not isinstance(leave_out, list) or not all(type(number) is int for number in leave_out):
        raise ValueError(f"leave_out {shown(leave_out)} is not a list of turns")
    blocked = said.get("blocked_s")
    return {
        "reward": None if reward is None else float(reward),
        "metrics": {name: float(value) for name, value in metrics.items()},
        "leave_out": leave_out,
        "blocked_s": float(blocked) if blocked is not None and _is_finite(blocked) else 0.0,
    }


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
