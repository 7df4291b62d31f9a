"""Trained trajectories on disk, for people, for parity tests and for training the same batches again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from replay.messages import Batch


class RolloutWriter:
    """Writes this rank's trajectories of every so many steps."""

    def __init__(self, config: Config) -> None:
        self._run_dir, self._every = config.run_dir, config.tracking.save_rollouts_every
        self._tokenizer: Any = load_tokenizer(config.model.path) if self._every else None

    def write_if_due(self, batch: Batch, advantages: NDArray[np.float32]) -> None:
        """Write the trajectories of the batch in every `tracking.save_rollouts_every`-th step."""
        if self._every and batch.step % self._every == 0:
            write_rollouts(self._run_dir, batch, advantages, self._text)

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer  # seconds, so only where trajectories are written

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def write_rollouts(
    run_dir: str, batch: Batch, advantages: NDArray[np.float32], text: Callable[[list[int]], str]
) -> Path:
    """Write this rank's trajectories of a step to `rollouts/step_N/rank_R.jsonl`, one a line.

    Logprobs are written with all their digits, so reading them back gives the same float32. `text` decodes tokens,
    special ones included.
    """
    path = Path(run_dir) / "rollouts" / f"step_{batch.step}" / f"rank_{batch.rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.concatenate([[0], np.cumsum(batch.prompt_lengths + batch.lengths, dtype=np.int64)])
    answers = np.concatenate([[0], np.cumsum(batch.lengths, dtype=np.int64)])
    with path.open("w", encoding="utf-8") as file:
        for i, trajectory in enumerate(batch.trajectory.tolist()):
            first = int(tokens[i]) + int(batch.prompt_lengths[i])
            answer = slice(int(answers[i]), int(answers[i + 1]))
            prompt_ids = batch.token_ids[int(tokens[i]) : first].tolist()
            response_ids = batch.token_ids[first : int(tokens[i + 1])].tolist()
            row = {
                "trajectory": trajectory,
                "group": batch.group_ids[int(batch.all_groups[trajectory])],
                "prompt": text(prompt_ids),
                "text": text(response_ids),
                "score": float(batch.all_rewards[trajectory]),
                "reward": float(batch.all_rewards[trajectory]),
                "advantage": float(advantages[trajectory]),
                "prompt_ids": prompt_ids,
                "response_ids": response_ids,
                "loss_mask": batch.loss_mask[answer].tolist(),
                "logprobs": batch.logprobs[answer].tolist(),
                "versions": batch.versions[answer].tolist(),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path
