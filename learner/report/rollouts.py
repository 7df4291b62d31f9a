"""Trained trajectories on disk, for people, for parity tests and for training the same batches again."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from replay.messages import Batch


def write_rollouts(run_dir: str, batch: Batch, advantages: NDArray[np.float32]) -> Path:
    """Write this rank's trajectories of a step to `rollouts/step_N/rank_R.jsonl`, one a line.

    Logprobs are written with all their digits, so reading them back gives the same float32.
    """
    path = Path(run_dir) / "rollouts" / f"step_{batch.step}" / f"rank_{batch.rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.concatenate([[0], np.cumsum(batch.prompt_lengths + batch.lengths, dtype=np.int64)])
    answers = np.concatenate([[0], np.cumsum(batch.lengths, dtype=np.int64)])
    with path.open("w", encoding="utf-8") as file:
        for i, trajectory in enumerate(batch.trajectory.tolist()):
            first = int(tokens[i]) + int(batch.prompt_lengths[i])
            answer = slice(int(answers[i]), int(answers[i + 1]))
            row = {
                "trajectory": trajectory,
                "group": batch.group_ids[int(batch.all_groups[trajectory])],
                "reward": float(batch.all_rewards[trajectory]),
                "advantage": float(advantages[trajectory]),
                "prompt_ids": batch.token_ids[int(tokens[i]) : first].tolist(),
                "response_ids": batch.token_ids[first : int(tokens[i + 1])].tolist(),
                "loss_mask": batch.loss_mask[answer].tolist(),
                "logprobs": batch.logprobs[answer].tolist(),
                "versions": batch.versions[answer].tolist(),
            }
            file.write(json.dumps(row) + "\n")
    return path
