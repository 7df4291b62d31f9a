"""Run folders as the dashboard reads them, of any size, without a run."""

import json
import math
import random
from pathlib import Path
from typing import Any

START = 1_760_000_000.0
HOSTILE = "</pre><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"


def metrics_row(step: int) -> dict[str, Any]:
    """A second a step: .2 s of waiting, .5 of training, .1 and .2 of publishing."""
    return {
        "step": step, "time": START + step, "critic/score/mean": 1 - math.exp(-step / 20),
        "actor/entropy": 1 / (1 + step),
        "training/off_policy/trajectory_staleness/mean": 0.9, "training/off_policy/trajectory_staleness/max": 1,
        "training/ess": 0.98, "actor/ppo_kl": 0.01, "trainer/idle_ratio": 0.2, "rollout/idle_ratio": 0.1,
        "training/lag_histogram": {"0": 10, "1": 90}, "timing_s/step": 1.0, "timing_s/wait_batch": 0.2,
        "timing_s/update_actor": 0.5, "timing_s/publish_wait": 0.1, "timing_s/param_sync": 0.2,
        "weight_sync/version": step - 1, "weight_sync/seconds": 0.05, "rollout/groups/rollout-0": 4 * step,
    }  # fmt: skip


def trajectory(step: int, number: int, *, text: str = "", length: int = 6, reward: float = 1.0) -> dict[str, Any]:
    """One line of rollouts/step_N/rank_R.jsonl: two turns, between them a token of the environment."""
    mask = [1] * length
    mask[length // 2] = 0
    return {
        "trajectory": number, "group": [0, number // 4], "prompt": f"prompt {number}",
        "text": text or f"answer {number}",
        "score": reward, "reward": reward, "advantage": 2 * reward - 1, "prompt_ids": [1, 2],
        "response_ids": list(range(length)), "loss_mask": mask, "tokens": [text or f"t{i}" for i in range(length)],
        "logprobs": [-0.1 * i if trained else 0.0 for i, trained in enumerate(mask)],
        "trainer_logprobs": [-0.1 * i - 0.01 if trained else None for i, trained in enumerate(mask)],
        "versions": [step - 1 - number % 2] * length,
    }  # fmt: skip


def compacted(step: int, number: int) -> list[dict[str, Any]]:
    """Two samples of one episode; of the second one's first turn, two tokens were sampled and are not trained."""
    first, second = trajectory(step, number, length=6), trajectory(step, number, length=8)
    second["loss_mask"][:2] = [0, 0]
    second["logprobs"][:2] = [-0.5, -0.6]
    second["trainer_logprobs"][:2] = [None, None]
    return [first, second]


def write(
    folder: Path, *, steps: int = 10, per_step: int = 8, length: int = 6, hostile: bool = False, every: int = 1
) -> Path:
    """A finished run of one rollout server and one rank; rewards are 0 or 1, lengths differ with `length`."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"learner: {{total_steps: {steps}}}\nrollout: {{max_new_tokens: {length}}}\n")
    rows: list[dict[str, Any]] = [metrics_row(step) for step in range(1, steps + 1)]
    rows += [{"version": v, "time": START + v, "val-core/sums/greedy": v / steps} for v in (0, steps)]
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "timeline.jsonl", timeline(steps))
    dice = random.Random(0)
    for step in range(every, steps + 1, every):
        made = [
            trajectory(step, i, text=HOSTILE if hostile else "", length=2 + dice.randrange(length - 1), reward=i % 2)
            for i in range(per_step)
        ]
        write_lines(folder / "rollouts" / f"step_{step}" / "rank_0.jsonl", made)
    answers = {"prompt": [{"role": "user", "content": HOSTILE}], "ground_truth": "1", "data_source": "sums"}
    line = {"index": 0, **answers, "text": HOSTILE, "reward": 0.0, "tokens": 3, "finish_reason": "length"}
    write_lines(folder / "evaluations" / f"version_{steps}_greedy.jsonl", [line])
    return folder


def timeline(steps: int) -> list[dict[str, Any]]:
    """A server that samples .7 s of every second, is lost half way, comes back, and is quarantined once."""
    name, half = "rollout-0", START + steps // 2
    joined = {"name": name, "event": "joined", "role": "rollout_server", "host": "n1"}
    lines: list[dict[str, Any]] = [{"time": START, **joined, "pid": 1}]
    for step in range(steps):
        at = START + step
        lines += [{"time": at, "name": name, "state": "rollout", "version": step}]
        lines += [{"time": at + 0.7, "name": name, "state": "wait", "version": step}]
    lines += [
        {"time": half + 0.8, "name": name, "event": "lost", "why": "silent"},
        {"time": half + 0.9, **joined, "pid": 2},
        {"time": half + 0.95, "name": name, "state": "quarantined", "version": 3},
        {"time": half + 0.96, "name": name, "event": "serves", "version": 4, "gauges": {"tokens_per_s": 870.0}},
        {"time": START + steps, "name": "replay", "event": "ended", "why": "all steps are done", "failed": False},
    ]
    return sorted(lines, key=lambda line: line["time"])


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
