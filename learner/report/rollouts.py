"""Trained trajectories on disk, for people, for parity tests and for training the same batches again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from learner.packing import offsets
from replay.messages import Batch


class RolloutWriter:
    """Writes this rank's trajectories of every `tracking.save_rollouts_every`-th step."""

    def __init__(self, config: Config) -> None:
        self._run_dir, self._every = Path(config.run_dir), config.tracking.save_rollouts_every
        self._tokenizer: Any = load_tokenizer(config.model.path) if self._every else None

    def write_if_due(self, batch: Batch, advantages: NDArray[np.float32]) -> None:
        """Write `rollouts/step_N/rank_R.jsonl`, one trajectory a line.

        Logprobs are written with all their digits, so reading them back gives the same float32; text with special
        tokens.
        """
        if not self._every or batch.step % self._every:
            return
        path = self._run_dir / "rollouts" / f"step_{batch.step}" / f"rank_{batch.rank}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens = np.split(batch.token_ids, offsets(batch.prompt_lengths + batch.lengths)[1:-1])
        answers = offsets(batch.lengths)
        with path.open("w", encoding="utf-8") as file:
            for i, trajectory in enumerate(batch.trajectory.tolist()):
                prompt_length = int(batch.prompt_lengths[i])
                prompt_ids, response_ids = tokens[i][:prompt_length].tolist(), tokens[i][prompt_length:].tolist()
                answer = slice(answers[i], answers[i + 1])
                row = {
                    "trajectory": trajectory,
                    "group": batch.group_ids[int(batch.all_groups[trajectory])],
                    "prompt": self._text(prompt_ids),
                    "text": self._text(response_ids),
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

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer  # seconds, so only where trajectories are written

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
