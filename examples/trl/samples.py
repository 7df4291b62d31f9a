"""From replay's batches to TRL's queue of samples: what each holds, and what comes in which order.

TRL takes maxima over the tokens of each row: an answer that no token of is in the loss, cut or too old, stands there
with one token and advantage 0. It also reads one microbatch ahead of its update (examples/trl/agreement.py). With
batches of two microbatches, a and b, and fillers F, the queue holds F a1 b1 | F a2 b2 | F ...: after b1 it gives the
next F, and a2 only once update 1 is committed. A filler is a prompt and one answer token of the last batch with
advantage 0: its gradient is exactly 0. The advantages of the others are scaled by what TRL's mean over microbatches
takes from them.
"""

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import SlipstreamError
from examples.trl.agreement import READ_AHEAD
from learner.rows import BatchError
from replay.messages import Batch


class OutOfStep(SlipstreamError, RuntimeError, code="SLIP-TRL-02"):
    """TRL reads or commits in another rhythm than one batch an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What TRL's RolloutSample holds, field by field; RolloutSample(**fields_of(sample)) is one.

    Example: prompt [7, 8] with answer [9, 2], all of it sampled, has input_ids [7, 8, 9, 2], completion_mask
    [0, 0, 1, 1] and old_log_probs [0, 0, -0.1, -0.7].
    """

    input_ids: NDArray[np.int64]
    """[L] prompt and answer."""
    completion_mask: NDArray[np.int64]
    """[L] 1 for tokens in the loss."""
    old_log_probs: NDArray[np.float32]
    """[L] of the policy that sampled the token; 0 elsewhere."""
    advantage: float
    model_version: int
    """As TRL counts, which is at 1 when our version 0 is live: that of the oldest token in the loss."""
    group_id: int
    metrics: dict[str, float]
    prompt: list[dict[str, str]] = field(default_factory=list)
    completion: list[dict[str, str]] = field(default_factory=list)
    enqueued_at: float | None = None


def fields_of(sample: Sample) -> dict[str, Any]:
    """Field by field, without copies."""
    return {name: getattr(sample, name) for name in Sample.__dataclass_fields__}


def samples_of(batch: Batch, advantages: NDArray[np.float32], *, num_groups: int, size: int) -> list[Sample]:
    """The samples of a batch, groups together, in replay's order.

    Args:
        batch: the whole batch, on one rank, which `learner.rows.check` has let pass.
        advantages: [N] of each trajectory.
        num_groups: groups of a step; numbers groups over the run.
        size: samples that TRL expects; in place of answers that were left out come some of advantage 0.

    Raises:
        BatchError: an episode has several samples, so that a batch of `size` trajectories is more than `size` samples.
    """
    if batch.lengths.size != batch.all_rewards.size or batch.all_rewards.size > size:
        raise BatchError(
            f"batch {batch.step} has {batch.lengths.size} samples of {batch.all_rewards.size} trajectories, and TRL's"
            f" update takes {size}: episodes of several samples (environments that compact their context) have no"
            " place there; train them with `python -m learner.main`"
        )
    deviations = [float(batch.all_rewards[batch.all_groups == g].std()) for g in range(len(batch.group_ids))]
    ends, answers = np.cumsum(batch.prompt_lengths + batch.lengths), np.cumsum(batch.lengths)
    made = []
    for i in np.argsort(batch.trajectory, kind="stable").tolist():
        prompt, length = int(batch.prompt_lengths[i]), int(batch.lengths[i])
        answer = slice(int(answers[i]) - length, int(answers[i]))
        trajectory = int(batch.trajectory[i])
        group = int(batch.all_groups[trajectory])
        in_loss, versions = batch.loss_mask[answer] != 0, batch.versions[answer]
        teaches = bool(in_loss.any())
        oldest = int(versions[in_loss].min()) if teaches else batch.step - 1
        logprobs, nothing = np.where(in_loss, batch.logprobs[answer], 0), np.zeros(prompt)
        first, kept = int(ends[i]) - prompt - length, length if teaches else 1
        made.append(
            Sample(
                input_ids=batch.token_ids[first : first + prompt + kept].astype(np.int64),
                completion_mask=np.concatenate([nothing, in_loss[:kept] | (not teaches)]).astype(np.int64),
                old_log_probs=np.concatenate([nothing, logprobs[:kept]]).astype(np.float32),
                advantage=float(advantages[trajectory]) if teaches else 0.0,
                model_version=oldest + 1,
                group_id=(batch.step - 1) * num_groups + group,
                metrics={
                    "reward": float(batch.all_rewards[trajectory]),
                    "reward_std": deviations[group],
                    "sample/lag_max": float(batch.step - 1 - oldest),
                },
            )
        )
    return made + [filler_of(made, batch.step)] * (size - len(made))


def filler_of(samples: Sequence[Sample], version: int) -> Sample:
    """A sample of advantage 0: the shortest prompt of these with its first token in the loss, and no metrics."""
    shortest = min(samples, key=lambda sample: int(sample.completion_mask.argmax()))
    end = int(shortest.completion_mask.argmax()) + 1
    return Sample(
        input_ids=shortest.input_ids[:end],
        completion_mask=shortest.completion_mask[:end],
        old_log_probs=shortest.old_log_probs[:end],
        advantage=0.0,
        model_version=version,
        group_id=shortest.group_id,
        metrics={},
    )


class SampleQueue(queue.Queue[Any]):
    """TRL's `rollout_buffer`: asks replay for the next batch when TRL has read the last one. For TRL's main thread.

    Args:
        take: gives the `size` samples of batch s, and waits for it.
        make: a RolloutSample from the fields of one.
        size: samples of a batch.
        microbatch: samples of one microbatch of all processes.
    """

    def __init__(
        self, take: Callable[[int], list[Sample]], make: Callable[..., Any], *, size: int, microbatch: int
    ) -> None:
        super().__init__()
        self._take, self._make = take, make
        self._size, self._microbatch = size, microbatch
        self._filler: Sample | None = None
        self._committed = self._taken = 0
        self._has_read_ahead = False
        self.read = 0
        """Samples that TRL has read."""

    @property
    def scale(self) -> float:
        """What TRL's mean over microbatches is multiplied with, for it to be over those of the batch."""
        full = self._size // self._microbatch
        return (full + READ_AHEAD) / full

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next sample. Waits as long as replay's deadlines allow, not for `timeout`: those name what is missing."""
        if self.empty():
            self._fill()
        self.read += 1
        return super().get(block=False)

    def committed(self, step: int) -> None:
        """TRL has made update `step`. Raises OutOfStep: of other samples than batch `step`."""
        due = step * (self._size + self._microbatch) + self._microbatch * READ_AHEAD
        if step != self._committed + 1 or self.read != due:
            raise OutOfStep(
                f"TRL has made update {step} (after {self._committed}) and read {self.read} samples, {due} are due:"
                " an update is not one batch; take AsyncGRPOConfig(..., **trl_arguments(config, ...)) and no"
                " token_budget"
            )
        self._committed = step

    def _fill(self) -> None:
        if self._taken == self._committed:
            step = self._taken + 1
            samples = self._take(step)
            self._filler = filler_of(samples, step)
            if step == 1:
                self._add([self._filler] * self._microbatch, 1.0)
            self._add(samples, self.scale)
            self._taken, self._has_read_ahead = step, False
        elif not self._has_read_ahead and self._filler is not None:
            self._add([self._filler] * self._microbatch, 1.0)
            self._has_read_ahead = True
        else:
            raise OutOfStep(
                f"TRL reads beyond batch {self._taken} and the microbatch after it before update {self._taken}; take"
                " AsyncGRPOConfig(..., **trl_arguments(config, ...)) and no token_budget"
            )

    def _add(self, samples: Sequence[Sample], scale: float) -> None:
        now = time.time()
        for sample in samples:
            fields = fields_of(sample)
            self.put_nowait(self._make(**{**fields, "advantage": sample.advantage * scale, "enqueued_at": now}))
