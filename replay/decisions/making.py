"""Makes groups of the rows themselves, where learner.objective learns from data.train: no server, no lease, no lag.

A group is admitted, journalled and taken like one that was sampled. The journal has its tokens, so that neither a
restart nor a playback depends on tokenizer and template being what they were. No socket.
"""

import logging
import time
from collections import deque
from dataclasses import replace

import numpy as np

from replay import messages as m
from replay.channel.frames import encode
from replay.data import BROKEN, PromptSource
from replay.data.encoding import Encoded, RowEncoder, Unusable
from replay.decisions.leasing import LeaseScheduler
from replay.state.apply import record
from replay.state.leases import Slot, SlotState
from replay.state.run import RunState
from slipstream.runtime.lifeline import BoundedLog

log = logging.getLogger(__name__)

TURN_S = 0.5
"""How long groups are made before replay looks at its messages again."""


class GroupMaker:
    """Keeps the buffer full."""

    def __init__(self, run: RunState, leasing: LeaseScheduler) -> None:
        """Raises ConfigError, FingerprintError: the model folder cannot be used for it."""
        self.run, self.leasing, self.buffer = run, leasing, run.buffer
        self._encoder = RowEncoder(run.config, run.config.learner.facts.answers)

    def fill(self, now: float) -> None:
        """Make what there is room for, in the order of the data; for TURN_S at most."""
        until = time.perf_counter() + TURN_S
        waiting = deque(slot for slot in self.buffer.slots.values() if slot.state is not SlotState.BUFFERED)
        while time.perf_counter() < until and (waiting or self.buffer.room > 0):
            if waiting:
                slot = waiting.popleft()
                group_id, attempt, needed = slot.group_id, slot.attempt + 1, slot.min_version
            else:
                group_id, attempt, needed = self.run.upcoming(), 1, self.buffer.next_min_version()
            fields = {"group": list(group_id), "attempt": attempt, "min_version": needed, "server": None}
            record(self.run, "lease", fields | {"async_lag": self.buffer.async_lag}, now=now)
            self._make(self.buffer.slots[group_id])
            if self.buffer.fruitless >= len(self.run.source):
                return  # the run has ended: there is no other row

    def _make(self, slot: Slot) -> None:
        if BROKEN in slot.row:
            self.leasing.drop(slot, "broken_row", slot.row[BROKEN])
            return
        try:
            found = self._encoder.encode(slot.row)
        except Unusable as problem:
            self.leasing.bounded.warning(
                problem.reason, "replay: row %d of data.train is left out: %s", slot.group_id[1], problem
            )
            self.leasing.drop(slot, problem.reason, str(problem))
            return
        group = group_of(slot, found)
        fields = {"group": list(slot.group_id), "attempt": slot.attempt, "server": None}
        record(self.run, "group", fields, encode(group, "", slot.attempt))
        slot.group = group


class RowsBeside:
    """The rows of learner.sft, which each batch has besides its groups: which ones follows from the step alone.

    So nothing of them is journalled but what dataset they are of (in the source's state).
    """

    def __init__(self, run: RunState, source: PromptSource) -> None:
        """Raises ConfigError, FingerprintError: the model folder cannot be used for it."""
        self.run, self.source, self.number = run, source, run.config.learner.sft.rows_per_step
        self._encoder = RowEncoder(run.config)
        self._bounded = BoundedLog(log)

    def groups(self, step: int) -> list[m.Group]:
        """Those of a step; fewer than asked for, where rows cannot be used."""
        self.source.begin_at((step - 1) * self.number)
        found = []
        for pass_, index, row in (self.source.next() for _ in range(self.number)):
            try:
                if BROKEN in row:
                    raise Unusable(str(row[BROKEN]), "broken_row")
                encoded = self._encoder.encode(row)
            except Unusable as problem:
                self._bounded.warning(problem.reason, "replay: row %d of learner.sft is left out: %s", index, problem)
                continue
            # group ids of their own, beside those of data.train
            found.append(group_of(Slot((-1 - pass_, index), row, step - 1), encoded))
        return found


def group_of(slot: Slot, found: list[Encoded]) -> m.Group:
    """The trajectories of a row as a group, of the oldest version that may be trained with them (`as_of`)."""
    pass_, index = slot.group_id
    lengths = np.array([one.token_ids.size for one in found], np.int32)
    total = int(lengths.sum())
    return m.Group(
        pass_=pass_,
        index=index,
        attempt=slot.attempt,
        finish_reasons=["stop"] * len(found),
        reward_metrics={},
        generate_s=0.0,
        data_source=slot.row["data_source"],
        prompt_ids=np.concatenate([one.prompt_ids for one in found]),
        prompt_lengths=np.array([one.prompt_ids.size for one in found], np.int32),
        lengths=lengths,
        token_ids=np.concatenate([one.token_ids for one in found]),
        loss_mask=np.concatenate([one.loss_mask for one in found]),
        logprobs=np.zeros(total, np.float32),
        versions=np.full(total, slot.min_version, np.int32),
        rewards=np.zeros(len(found), np.float32),
    )


def as_of(group: m.Group, step: int) -> m.Group:
    """The group as batch `step` has it: no policy sampled it, so none of its tokens has a lag."""
    return replace(group, versions=np.full_like(group.versions, step - 1))
