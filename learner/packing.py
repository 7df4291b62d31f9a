"""From a rank's part of a batch to its microbatches: tensors aligned to the predicted token.

Pure. The number of microbatches and who is in which was fixed by replay for all ranks at once; this only
lays tokens out, in one of two ways:

    padded    one row a trajectory, padded on the right. That needs no attention mask: under causal attention a token
              sees only what stands left of it, so padding is seen by padding alone, and padding is never in the loss.
    unpadded  all trajectories in a single row, for attention that is told where each starts (learner/attention.py);
              the measurements have one column for each token in the loss and no other.

Either way position ids are 0, 1, 2, ... in every trajectory, as in the engine that sampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from replay.messages import Batch

PAD_ID = 0
"""Any id of the vocabulary: what stands in the padding is never looked at."""

COLUMNS = ("mask", "behaviour_logprobs", "advantages", "lags")
"""Arrays of a microbatch that have one number for each predicted token."""

Piece = tuple[NDArray[np.int32], NDArray[np.float32]]
"""A trajectory: its token ids [T], and COLUMNS of its answer's tokens [4, length]."""


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
        moved: Microbatch = _moved(self, device)
        return moved


@dataclass(frozen=True, slots=True)
class Packed:
    """This rank's microbatches, and what all ranks agree on."""

    microbatches: list[Microbatch]
    global_tokens: int
    """Tokens in the loss over the whole batch and its active trajectories."""


def active_trajectories(advantages: NDArray[np.float32], *, drop_zero_advantage: bool) -> NDArray[np.bool_]:
    """[N] which trajectories of the batch are trained on; all, unless those of zero advantage are dropped."""
    return advantages != 0 if drop_zero_advantage else np.ones(advantages.shape, np.bool_)


def offsets(lengths: NDArray[Any] | Sequence[int]) -> NDArray[np.int64]:
    """[n+1] where each of n consecutive pieces begins, then the total."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def pack(batch: Batch, advantages: NDArray[np.float32], active: NDArray[np.bool_], *, unpadded: bool = False) -> Packed:
    """Exactly `batch.num_microbatches` microbatches of this rank, in order and in host memory.

    A microbatch that holds no active trajectory becomes a dummy of two tokens and none in the loss, so that this
    rank takes part in every collective of the others (invariant 9).

    Args:
        batch: this rank's part, which `check` has let pass.
        advantages: [N] float32, of the whole batch.
        active: [N] bool, of the whole batch; the other trajectories are left out, and so are those without a
            token in the loss.
        unpadded: the layout, see above.
    """
    advantage = np.repeat(advantages[batch.trajectory], batch.lengths)
    values = np.stack([batch.loss_mask != 0, batch.logprobs, advantage, _lags(batch)]).astype(np.float32)
    tokens = np.split(batch.token_ids, offsets(batch.prompt_lengths + batch.lengths)[1:-1])
    answers = np.split(values, offsets(batch.lengths)[1:-1], axis=1)
    contents: list[list[Piece]] = [[] for _ in range(batch.num_microbatches)]
    trained = active & (batch.all_loss_tokens > 0)
    for row in np.flatnonzero(trained[batch.trajectory]):
        contents[batch.microbatch[row]].append((tokens[row], answers[row]))
    lay_out = _unpadded if unpadded else _padded
    return Packed([lay_out(pieces) for pieces in contents], int(batch.all_loss_tokens[active].sum(dtype=np.int64)))


def _padded(pieces: Sequence[Piece]) -> Microbatch:
    width = max((len(tokens) for tokens, _ in pieces), default=2)
    input_ids = np.full((max(1, len(pieces)), width), PAD_ID, np.int64)
    columns = np.zeros((len(COLUMNS), len(input_ids), width - 1), np.float32)
    for slot, (tokens, answer) in enumerate(pieces):
        input_ids[slot, : len(tokens)] = tokens
        columns[:, slot, len(tokens) - 1 - answer.shape[1] : len(tokens) - 1] = answer
    return _microbatch(input_ids, columns, None)


def _unpadded(pieces: Sequence[Piece]) -> Microbatch:
    every = [tokens for tokens, _ in pieces] or [np.full(2, PAD_ID)]
    firsts = offsets([len(tokens) for tokens in every])
    kept, columns = [np.zeros(0, np.int64)], [np.zeros((len(COLUMNS), 0), np.float32)]
    for first, (tokens, answer) in zip(firsts, pieces, strict=False):
        in_loss = np.flatnonzero(answer[0])
        kept.append(first + len(tokens) - 1 - answer.shape[1] + in_loss)
        columns.append(answer[:, in_loss])
    row = Row(
        position_ids=torch.cat([torch.arange(len(tokens)) for tokens in every])[None],
        starts=torch.from_numpy(firsts.astype(np.int32)),
        longest=max(map(len, every)),
        kept=torch.from_numpy(np.concatenate(kept)),
    )
    return _microbatch(np.concatenate(every).astype(np.int64)[None], np.concatenate(columns, axis=1)[:, None], row)


def _microbatch(input_ids: NDArray[np.int64], columns: NDArray[np.float32], row: Row | None) -> Microbatch:
    named = dict(zip(COLUMNS, torch.from_numpy(columns), strict=True))
    return Microbatch(input_ids=torch.from_numpy(input_ids), **named, row=row)


def _moved(value: Any, device: torch.device) -> Any:
    """A dataclass with all its tensors on a device."""
    moved: dict[str, Any] = {}
    for field in fields(value):
        item = getattr(value, field.name)
        if isinstance(item, torch.Tensor):
            moved[field.name] = item.to(device, non_blocking=True)
        elif is_dataclass(item):
            moved[field.name] = _moved(item, device)
    return replace(value, **moved)


def _lags(batch: Batch) -> NDArray[np.int32]:
    """[answer tokens] version being trained minus version that sampled; 0 outside the loss."""
    return np.where(batch.loss_mask != 0, batch.step - 1 - batch.versions, 0)


def check(batch: Batch, *, async_lag: int, vocab_size: int) -> None:
    """Refuse a batch that contradicts itself, the lag bound (invariant 1, the learner's own look) or the model.

    Raises:
        PackingError: arrays disagree in length, an index or a token id is out of range, a trajectory has no prompt, a
            token in the loss is over-age or from the future, or its behaviour logprob or a reward is not finite.
    """
    where = f"batch {batch.step}, rank {batch.rank}"
    _check_shapes(batch, where, vocab_size)
    in_loss, lags = batch.loss_mask != 0, _lags(batch)
    if (i := _first((batch.prompt_lengths < 1) | (batch.lengths < 0))) is not None:
        raise PackingError(
            f"{where}: trajectory {batch.trajectory[i]} has a prompt of {batch.prompt_lengths[i]} tokens"
            f" and an answer of {batch.lengths[i]}"
        )
    if (i := _first((lags < 0) | (lags > async_lag))) is not None:
        raise PackingError(
            f"{where}: a token sampled by version {batch.versions[i]} has lag {lags[i]}, allowed are 0 to {async_lag}"
        )
    if (i := _first(~np.isfinite(batch.all_rewards))) is not None:
        raise PackingError(f"{where}: reward of trajectory {i} is {batch.all_rewards[i]}")
    if (i := _first(in_loss & ~np.isfinite(batch.logprobs))) is not None:
        raise PackingError(f"{where}: answer token {i} has behaviour logprob {batch.logprobs[i]}")
    counts = np.diff(offsets(in_loss)[offsets(batch.lengths)])
    stated = batch.all_loss_tokens[batch.trajectory]
    if (i := _first(counts != stated)) is not None:
        raise PackingError(
            f"{where}: trajectory {batch.trajectory[i]} has {counts[i]} tokens in the loss,"
            f" all_loss_tokens says {stated[i]}"
        )


def _check_shapes(batch: Batch, where: str, vocab_size: int) -> None:
    n, total, answers = len(batch.trajectory), int(batch.prompt_lengths.sum()), int(batch.lengths.sum())
    lengths = {"microbatch": n, "prompt_lengths": n, "lengths": n, "token_ids": total + answers}
    lengths |= dict.fromkeys(("loss_mask", "logprobs", "versions"), answers)
    lengths |= dict.fromkeys(("all_groups", "all_loss_tokens"), len(batch.all_rewards))
    for name, length in lengths.items():
        if len(getattr(batch, name)) != length:
            raise PackingError(f"{where}: {name} has {len(getattr(batch, name))} entries, not {length}")
    limits = {
        "trajectory": len(batch.all_rewards),
        "microbatch": batch.num_microbatches,
        "token_ids": vocab_size,
    }
    for name, limit in limits.items():
        values = getattr(batch, name)
        if (i := _first((values < 0) | (values >= limit))) is not None:
            raise PackingError(f"{where}: {name}[{i}] is {values[i]}, not below {limit}")


def _first(wrong: NDArray[np.bool_]) -> int | None:
    """Index of the first wrong element; None without any."""
    places = np.flatnonzero(wrong)
    return int(places[0]) if places.size else None
