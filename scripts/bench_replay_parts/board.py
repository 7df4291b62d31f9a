"""Counters that the processes of a case share: a small file in memory, one writer a field, no lock.

The version is what the weight bus would tell rollout servers; everything else is for the measurement.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

FIELDS = (
    "version",  # learner: newest version that was published
    "steps",  # learner: committed
    "tokens",  # learner: answer tokens of committed steps
    "batch_bytes",  # learner: frames of the batches that came
    "joined",  # producers: that are welcome
    "groups",  # producers: accepted
    "group_tokens",  # producers: answer tokens of them
    "group_bytes",  # producers: their frames
    "refused",  # producers: acks other than `accepted`, cancels and refusals
    "stop",  # the command: LEARNER_STOPS, then ALL_STOP
    "hold",  # the command: the learner joins and takes nothing
    "resting_bytes",  # the command: resident memory of replay before any group came
)
LEARNER_STOPS, ALL_STOP = 1, 2


class Board:
    """One int64 a field; a store of eight aligned bytes is whole."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.parent.mkdir(parents=True, exist_ok=True)
            np.zeros(len(FIELDS), dtype=np.int64).tofile(path)
        self._values = np.memmap(path, dtype=np.int64, mode="r+", shape=(len(FIELDS),))

    def __getitem__(self, field: str) -> int:
        return int(self._values[FIELDS.index(field)])

    def __setitem__(self, field: str, value: int) -> None:
        self._values[FIELDS.index(field)] = value

    def add(self, field: str, value: int) -> None:
        """For the one process that writes this field."""
        self._values[FIELDS.index(field)] += value

    def read(self, fields: Sequence[str]) -> dict[str, int]:
        """Several fields, one after the other."""
        return {field: self[field] for field in fields}
