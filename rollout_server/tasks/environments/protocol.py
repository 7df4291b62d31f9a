"""Between the rollout server and an environment process, in frames (workers/frames.py).

| from    | message                                                                                        |
|---------|------------------------------------------------------------------------------------------------|
| server  | first: {"function": str, "options": {...}, "temperature": float, "turn_timeout_s": float}      |
| process | first: {"ready": true} or {"error": str}                                                       |
| server  | ["start", episode, row, seed, prompt_seed], ["cancel", episode],                               |
|         | ["answer", episode, call, value],                                                              |
|         | ["over", episode, call, text, kind], ["part", episode, call, text so far]: of a streamed turn  |
| process | ["ask", episode, call, what, arguments]: `turn`, or {"given": ...} to `encode`, `decode`, `pieces`  |
| process | ["leave", episode, call]: the function does not wait for it any more                           |
| process | ["cancelling", episode]: it has seen `cancel`, and the function cleans up                      |
| process | ["done", episode, outcome], ["failed", episode, text], ["cancelled", episode]                  |

Code of the user shares the process and may have written its messages: the server checks them.
"""

from typing import Any

from rollout_server.tasks.environments import ContextFull, EpisodeOver, NoMoreTurns
from rollout_server.tasks.workers.frames import is_number, metrics_of
from rollout_server.tasks.workers.frames import shown as shown

MAX_BYTES = 32 * 1024 * 1024
MAX_ITEMS = 1 << 20
OVER: dict[str, type[EpisodeOver]] = {"context": ContextFull, "turns": NoMoreTurns}
LIMITS = {"max_array_len": MAX_ITEMS, "max_map_len": MAX_ITEMS, "max_bin_len": MAX_BYTES, "max_ext_len": 0}


def read_outcome(said: Any) -> dict[str, Any]:
    """The checked fields of `done`. Raises ValueError, for the user to read."""
    if not isinstance(said, dict):
        raise ValueError(f"an outcome {shown(said)}")
    reward, leave_out, blocked = said.get("reward"), said.get("leave_out"), said.get("blocked_s")
    if reward is not None and not is_number(reward):
        raise ValueError(f"the reward {shown(reward)} is not a finite number")
    if not isinstance(leave_out, list) or not all(type(number) is int for number in leave_out):
        raise ValueError(f"leave_out {shown(leave_out)} is not a list of turns")
    return {
        "reward": None if reward is None else float(reward),
        "metrics": metrics_of(said.get("metrics")),
        "leave_out": leave_out,
        "blocked_s": float(blocked) if is_number(blocked) else 0.0,
    }
