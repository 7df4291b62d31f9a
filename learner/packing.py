"""From a rank's part of a batch to its microbatches: tensors aligned to the predicted token.

Pure. The number of microbatches and who is in which was fixed by replay for all ranks at once; this only
lays tokens out, in one of two ways:

    padded    one row a trajectory, padded on the right. That needs no attention mask: under causal attention a token
              sees only what stands left of it, so padding is seen by padding alone, and padding is never in the loss.
    unpadded  all trajectories in a single row, for attention that is told where each starts (learner/attention.py);
              the measurements have one column for each token in the loss and no other.

Either way position ids are 0, 1, 2, ... in every trajectory, as in the engine that sampled.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from replay.messages import Batch

PAD_ID = 0
"""Any id of the vocabulary: what stands in the padding is never looked at."""


class PackingError(ValueError):
    """The batch contradicts itself or the lag bound; it must not be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How trajectories lie in the single row of an unpadded microbatch.

    Example: trajectories of 4 and 2 tokens, the answers being [9, 2] and [5], have position_ids [[0, 1, 2, 3, 0, 1]],
    starts [0, 4, 6], longest 4, kept [1, 2, 4].
    """

    position_ids: torch.Tensor
    """[1, total] int64."""
    starts: torch.Tensor
    """[trajectories + 1] int32, first position of each, then the total."""
    longest: int
    """Tokens of the longest trajectory."""
    kept: torch.Tensor
    """[n] int64, positions whose next token is in the loss; column j of the microbatch speaks of position kept[j]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One forward. Column t of every array but input_ids speaks of the token predicted from position t.

    Without padding (`row` is given) B is 1, and instead of T-1 columns there are as many as tokens in the loss.

    Example: prompt [7, 8], answer [9, 2] of behaviour logprobs [-0.1, -0.3] give
    input_ids [[7, 8, 9, 2]], mask [[0, 1, 1]], behaviour_logprobs [[0, -0.1, -0.3]].
    """

    input_ids: torch.Tensor
    """[B, T] int64, prompt then answer, padded on the right."""
    mask: torch.Tensor
    """[B, T-1] float32, 1 where the predicted token is in the loss."""
    behaviour_logprobs: torch.Tensor
    """[B, T-1] float32, 0 outside answers."""
    advantages: torch.Tensor
    """[B, T-1] float32, the trajectory's advantage at its answer tokens, 0 elsewhere."""
    lags: torch.Tensor
    """[B, T-1] float32, version being trained minus version that sampled the token, 0 where the mask is 0."""
    row: Row | None = None
    """None if padded."""

    @property
    def targets(self) -> torch.Tensor:
        """[B, T-1] the predicted tokens."""
        return self.input_ids[:, 1:] if self.row is None else self.input_ids[:, self.row.kept + 1]

    def to(self, device: torch.device) -> "Microbatch":
        """The same microbatch on a device."""
        if self.input_ids.device == device:
            return self
        row = self.row and replace(
            self.row,
            position_ids=self.row.position_ids.to(device, non_blocking=True),
            starts=self.row.starts.to(device, non_blocking=True),
            kept=self.row.kept.to(device, non_blocking=True),
        )
        return Microbatch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            mask=self.mask.to(device, non_blocking=True),
            behaviour_logprobs=self.behaviour_logprobs.to(device, non_blocking=True),
            advantages=self.advantages.to(device, non_blocking=True),
            lags=self.lags.to(device, non_blocking=True),
            row=row,
        )


@dataclass(frozen=True, slots=True)
class Packed:
    """This rank's microbatches, and what all ranks agree on."""

    microbatches: list[Microbatch]
    global_tokens: int
    """Tokens in the loss over the whole batch and its active trajectories."""


def active_trajectories(advantages: NDArray[np.float32], *, drop_zero_advantage: bool) -> NDArray[np.bool_]:
    """[N] which trajectories of the batch are trained on; all, unless those of zero advantage are dropped."""
    return advantages != 0 if drop_zero_advantage else np.ones(advantages.shape, np.bool_)


def global_tokens(batch: Batch, active: NDArray[np.bool_]) -> int:
    """Tokens in the loss over the whole batch and its active trajectories: the same number on every rank."""
    return int(batch.all_loss_tokens[active].sum(dtype=np.int64))


def pack(
    batch: Batch,
    advantages: NDArray[np.float32],
    active: NDArray[np.bool_],
    *,
    async_lag: int,
    device: torch.device | None = None,
    unpadded: bool = False,
) -> Packed:
    """Exactly `batch.num_microbatches` microbatches of this rank, in order.

    A microbatch that holds no active trajectory becomes a dummy of weight zero, so that this rank takes part
    in every collective of the others (invariant 9).

    Args:
        batch: this rank's part.
        advantages: [N] float32, of the whole batch.
        active: [N] bool, of the whole batch; the other trajectories are left out, and so are those without a
            token in the loss.
        async_lag: largest lag a token in the loss may have (invariant 1, the learner's own look at it).
        device: where the tensors go; none leaves them in host memory.
        unpadded: the layout, see above.

    Raises:
        PackingError: arrays disagree in length, an index is out of range, a trajectory has no prompt, a token in
            the loss is over-age or from the future, or its behaviour logprob is not finite.
    """
    check(batch, async_lag=async_lag)
    if advantages.shape != batch.all_rewards.shape or active.shape != batch.all_rewards.shape:
        raise PackingError(
            f"batch {batch.step}: {len(batch.all_rewards)} trajectories, but {len(advantages)} advantages"
            f" and {len(active)} active marks"
        )
    token_starts = np.concatenate([[0], np.cumsum(batch.prompt_lengths + batch.lengths)])
    answer_starts = np.concatenate([[0], np.cumsum(batch.lengths)])
    lags = _lags(batch)
    rows_of: list[list[int]] = [[] for _ in range(batch.num_microbatches)]
    trained = active & (batch.all_loss_tokens > 0)
    for row in np.flatnonzero(trained[batch.trajectory]):
        rows_of[batch.microbatch[row]].append(int(row))
    lay_out = _unpadded if unpadded else _padded
    made = [lay_out(batch, advantages, lags, rows, (token_starts, answer_starts)) for rows in rows_of]
    return Packed([m.to(device) if device is not None else m for m in made], global_tokens(batch, active))


def check(batch: Batch, *, async_lag: int, vocab_size: int | None = None) -> None:
    """Refuse a batch that contradicts itself, the lag bound or the model.

    Raises:
        PackingError: see `pack`; or a token id is not below `vocab_size`.
    """
    _check_shapes(batch)
    _check_answers(batch, _lags(batch), np.concatenate([[0], np.cumsum(batch.lengths)]), async_lag)
    if vocab_size is not None:
        _check_range(batch, "token_ids", vocab_size)


def _lags(batch: Batch) -> NDArray[np.int32]:
    """[answer tokens] version being trained minus version that sampled; 0 outside the loss."""
    return np.where(batch.loss_mask != 0, batch.step - 1 - batch.versions, 0)


def _padded(
    batch: Batch,
    advantages: NDArray[np.float32],
    lags: NDArray[np.int32],
    rows: list[int],
    starts: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Microbatch:
    token_starts, answer_starts = starts
    width = max((int(token_starts[row + 1] - token_starts[row]) for row in rows), default=2)
    input_ids = np.full((max(1, len(rows)), width), PAD_ID, np.int64)
    mask, behaviour, advantage, lag = np.zeros((4, max(1, len(rows)), width - 1), np.float32)
    for slot, row in enumerate(rows):
        input_ids[slot, : token_starts[row + 1] - token_starts[row]] = batch.token_ids[
            token_starts[row] : token_starts[row + 1]
        ]
        answer = slice(answer_starts[row], answer_starts[row + 1])
        first = batch.prompt_lengths[row] - 1
        columns = slice(first, first + batch.lengths[row])
        mask[slot, columns] = batch.loss_mask[answer] != 0
        behaviour[slot, columns] = batch.logprobs[answer]
        advantage[slot, columns] = advantages[batch.trajectory[row]]
        lag[slot, columns] = lags[answer]
    return Microbatch(
        input_ids=torch.from_numpy(input_ids),
        mask=torch.from_numpy(mask),
        behaviour_logprobs=torch.from_numpy(behaviour),
        advantages=torch.from_numpy(advantage),
        lags=torch.from_numpy(lag),
    )


def _unpadded(
    batch: Batch,
    advantages: NDArray[np.float32],
    lags: NDArray[np.int32],
    rows: list[int],
    starts: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> Microbatch:
    if not rows:
        return _dummy_row()
    token_starts, answer_starts = starts
    lengths = [int(token_starts[row + 1] - token_starts[row]) for row in rows]
    firsts = np.concatenate([[0], np.cumsum(lengths)])
    columns, answers, advantage = [], [], []
    for first, row in zip(firsts[:-1], rows, strict=True):
        in_loss = np.flatnonzero(batch.loss_mask[answer_starts[row] : answer_starts[row + 1]])
        columns.append(first + batch.prompt_lengths[row] - 1 + in_loss)
        answers.append(answer_starts[row] + in_loss)
        advantage.append(np.full(len(in_loss), advantages[batch.trajectory[row]], np.float32))
    tokens = np.concatenate([batch.token_ids[token_starts[row] : token_starts[row + 1]] for row in rows])
    chosen = np.concatenate(answers)
    return Microbatch(
        input_ids=torch.from_numpy(tokens.astype(np.int64))[None],
        mask=torch.ones(1, len(chosen)),
        behaviour_logprobs=torch.from_numpy(batch.logprobs[chosen].astype(np.float32))[None],
        advantages=torch.from_numpy(np.concatenate(advantage))[None],
        lags=torch.from_numpy(lags[chosen].astype(np.float32))[None],
        row=Row(
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            starts=torch.from_numpy(firsts.astype(np.int32)),
            longest=max(lengths),
            kept=torch.from_numpy(np.concatenate(columns).astype(np.int64)),
        ),
    )


def _dummy_row() -> Microbatch:
    nothing = torch.zeros(1, 1)
    return Microbatch(
        input_ids=torch.full((1, 2), PAD_ID, dtype=torch.int64),
        mask=nothing,
        behaviour_logprobs=nothing,
        advantages=nothing,
        lags=nothing,
        row=Row(
            position_ids=torch.arange(2)[None],
            starts=torch.tensor([0, 2], dtype=torch.int32),
            longest=2,
            kept=torch.zeros(1, dtype=torch.int64),
        ),
    )


def _check_shapes(batch: Batch) -> None:
    n, total, answers = len(batch.trajectory), int(batch.prompt_lengths.sum()), int(batch.lengths.sum())
    expected = {
        "microbatch": n,
        "prompt_lengths": n,
        "lengths": n,
        "token_ids": total + answers,
        "loss_mask": answers,
        "logprobs": answers,
        "versions": answers,
        "all_groups": len(batch.all_rewards),
        "all_loss_tokens": len(batch.all_rewards),
    }
    for name, length in expected.items():
        if len(getattr(batch, name)) != length:
            raise PackingError(
                f"batch {batch.step}, rank {batch.rank}: {name} has {len(getattr(batch, name))} entries, not {length}"
            )
    _check_range(batch, "trajectory", len(batch.all_rewards))
    _check_range(batch, "microbatch", batch.num_microbatches)


def _check_range(batch: Batch, name: str, limit: int) -> None:
    values = getattr(batch, name)
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if wrong.size:
        raise PackingError(
            f"batch {batch.step}, rank {batch.rank}: {name}[{wrong[0]}] is {values[wrong[0]]}, not below {limit}"
        )


def _check_answers(batch: Batch, lags: NDArray[np.int32], starts: NDArray[np.int64], async_lag: int) -> None:
    where = f"batch {batch.step}, rank {batch.rank}"
    short = np.flatnonzero((batch.prompt_lengths < 1) | (batch.lengths < 0))
    if short.size:
        raise PackingError(
            f"{where}: trajectory {batch.trajectory[short[0]]} has a prompt of {batch.prompt_lengths[short[0]]} tokens"
            f" and an answer of {batch.lengths[short[0]]}"
        )
    in_loss = batch.loss_mask != 0
    wrong = np.flatnonzero((lags < 0) | (lags > async_lag))
    if wrong.size:
        raise PackingError(
            f"{where}: a token sampled by version {batch.versions[wrong[0]]} has lag {lags[wrong[0]]},"
            f" allowed are 0 to {async_lag}"
        )
    wrong = np.flatnonzero(in_loss & ~np.isfinite(batch.logprobs))
    if wrong.size:
        raise PackingError(f"{where}: answer token {wrong[0]} has behaviour logprob {batch.logprobs[wrong[0]]}")
    counts = np.diff(np.concatenate([[0], np.cumsum(in_loss)])[starts])
    wrong = np.flatnonzero(counts != batch.all_loss_tokens[batch.trajectory])
    if wrong.size:
        trajectory = batch.trajectory[wrong[0]]
        raise PackingError(
            f"{where}: trajectory {trajectory} has {counts[wrong[0]]} tokens in the loss,"
            f" all_loss_tokens says {batch.all_loss_tokens[trajectory]}"
        )
