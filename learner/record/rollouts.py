"""Trained trajectories on disk, for people, for parity tests and for training the same batches again."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from configs.schema import Config
from learner.rows import Row, offsets
from replay.messages import Batch
from slipstream.runtime.disk import Disk

if TYPE_CHECKING:
    import torch

    from learner.step import Measure


class RolloutWriter:
    """Writes this rank's trajectories of every `tracking.save_rollouts_every`-th step."""

    def __init__(self, config: Config, disk: Disk | None = None) -> None:
        self._disk = disk or Disk()
        self._run_dir, self._every = Path(config.run_dir), config.tracking.save_rollouts_every
        self._num_parts = config.num_data_ranks
        self._tokenizer: Any = load_tokenizer(config.model.path) if self._every else None
        self._pieces: dict[int, str] = {}
        self._measured: dict[int, tuple[Row, NDArray[np.float32]]] | None = None
        """By microbatch, its row and the trainer's first logprobs of its tokens, where the step is to be written."""

    def watch(self, objective: "Measure") -> "Measure":
        """The same objective, of whose logprobs this writer keeps a copy in the steps that it writes."""

        def watched(row: Row, logprobs: "torch.Tensor", *rest: "torch.Tensor") -> Any:
            if self._measured is not None and row.number not in self._measured:
                self._measured[row.number] = row, logprobs.detach().float().cpu().numpy()
            return objective(row, logprobs, *rest)

        return watched if self._every else objective

    def begin(self, step: int) -> None:
        """Call before a step is trained."""
        self._measured = {} if self._every and step % self._every == 0 else None

    def write_if_due(self, batch: Batch, advantages: NDArray[np.float32]) -> None:
        """Write `rollouts/step_N/rank_R.jsonl`, one sample a line: mostly a whole trajectory.

        Logprobs are written with all their digits, so reading them back gives the same float32; text with special
        tokens. `trainer_logprobs`, null of tokens that were not trained, are those of the first update on them.
        """
        if not self._every or batch.step % self._every:
            return
        path = self._run_dir / "rollouts" / f"step_{batch.step}" / f"rank_{batch.rank}.jsonl"
        if batch.rank == 0:  # where a run makes the step again with fewer ranks, files of the others have it twice
            for other in set(path.parent.glob("rank_*.jsonl")) - self._files(path.parent):
                other.unlink()
        tokens = np.split(batch.token_ids, offsets(batch.prompt_lengths + batch.lengths)[1:-1])
        answers = offsets(batch.lengths)
        trained = self._trainer_logprobs(batch)
        rows = []
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
                "tokens": [self._piece(token) for token in response_ids],
                "logprobs": batch.logprobs[answer].tolist(),
                "trainer_logprobs": [None if np.isnan(value) else value for value in trained[answer].tolist()],
                "versions": batch.versions[answer].tolist(),
            }
            rows.append(json.dumps(row, ensure_ascii=False) + "\n")
        self._disk.write(path, "".join(rows))

    def _files(self, folder: Path) -> set[Path]:
        """Those of all ranks in the folder of a step."""
        return {folder / f"rank_{rank}.jsonl" for rank in range(self._num_parts)}

    def _trainer_logprobs(self, batch: Batch) -> NDArray[np.float32]:
        """[answer tokens] float32, of this rank's samples; NaN of tokens that no row had in the loss."""
        values = np.full(len(batch.loss_mask), np.nan, np.float32)
        answers, in_loss = offsets(batch.lengths), batch.loss_mask != 0
        for number, (row, logprobs) in (self._measured or {}).items():
            here = (batch.microbatch == number) & np.isin(batch.trajectory, row.trajectories.cpu().numpy())
            places = [np.arange(answers[i], answers[i + 1]) for i in np.flatnonzero(here)]
            if places:  # as learner/rows.py lays them out: samples in order, their tokens in the loss
                chosen = np.concatenate(places)
                values[chosen[in_loss[chosen]]] = logprobs
        self._measured = None
        return values

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._text([token])
        return self._pieces[token]

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer  # seconds, so only where trajectories are written

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
