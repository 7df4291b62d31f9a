"""What the reference model gives the answers of pairs: sums of logprobs, computed once for each row of the dataset."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from learner.beside.advantages import over_trajectories
from learner.beside.reference import AdapterReference, Reference
from learner.policy.model import Policy
from learner.rows import BatchError, Row
from replay.messages import Batch


class PairReference:
    """Sums that the first pass over the data computes and later passes read, alike on all ranks.

    They are part of a checkpoint: a resumed run, or one that goes through the journal again, reads and computes the
    same, so that its digests are the journalled ones.
    """

    def __init__(self, reference: Reference | AdapterReference, policy: Policy) -> None:
        self.reference, self._policy = reference, policy
        self._known: dict[int, list[float]] = {}
        """By row of the dataset: of each answer."""

    def judge(self, batch: Batch, rows: Sequence[Row]) -> list[Row]:
        """The rows with their sums. A collective where a pair of the batch is new, on all ranks or on none.

        Raises:
            BatchError: the answers of a pair lie apart.
        """
        for row in rows:
            if not torch.equal(row.groups[::2], row.groups[1::2]):
                where = f"batch {batch.step}, rank {batch.rank}, microbatch {row.number}"
                raise BatchError(f"{where}: has one answer of a pair without the other one, or between those of others")
        indices = [index for _, index in batch.group_ids]
        if not self._known.keys() >= set(indices):
            found = [logprobs.double().numpy() for logprobs in self.reference.logprobs(rows)]
            sums = over_trajectories(batch, rows, {"reference": found}, self._policy)["reference"]
            ends = np.searchsorted(batch.all_groups, np.arange(1, len(indices)))
            for index, answers in zip(indices, np.split(sums, ends), strict=True):
                self._known.setdefault(index, answers.tolist())
        totals = torch.tensor([value for index in indices for value in self._known[index]], dtype=torch.float32)
        return [replace(row, reference_sums=totals[row.trajectories]) for row in rows]

    def state(self) -> list[list[float]]:
        """For checkpoints."""
        return [[index, *answers] for index, answers in self._known.items()]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """What an earlier run has computed."""
        self._known = {int(index): list(answers) for index, *answers in state}
