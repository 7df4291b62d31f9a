"""From a rank's part of a batch to its rows: one unpadded row of tokens a microbatch.

Pure. The number of microbatches and who is in which was fixed by replay for all ranks at once. Trajectories lie one
after the other, with positions 0, 1, 2, ... in each, as in the engine that sampled; attention is given where each
starts (learner/attention.py). What is measured and trained has one element for each token in the loss and no other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from replay.messages import Batch

PAD_ID = 0
"""Any id of the vocabulary: what stands in the padding is never looked at."""
MIN_TOKENS = 2


class BatchError(ValueError):
    """The batch contradicts itself or the lag bound; it must not be trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One microbatch: m trajectories, n tokens in the loss.

    Example: prompt [7, 8] with answer [9, 2] and prompt [6] with answer [5], all answers in the loss, have
    input_ids [[7, 8, 9, 2, 6, 5]], position_ids [[0, 1, 2, 3, 0, 1]], starts [0, 4, 6], kept [1, 2, 4],
    targets [9, 2, 5] and lengths [2, 1].
    """

    input_ids: torch.Tensor
    """[1, total] int64, prompt then answer of each trajectory."""
    position_ids: torch.Tensor
    """[1, total] int64."""
    starts: torch.Tensor
    """[m+1] int32, first position of each trajectory, then the total."""
    longest: int
    """Tokens of the longest trajectory."""
    kept: torch.Tensor
    """[n] int64, positions whose next token is in the loss."""
    targets: torch.Tensor
    """[n] int64, those next tokens; all tensors below speak of them."""
    behaviour_logprobs: torch.Tensor
    """[n] float32, of the policy that sampled the token."""
    advantages: torch.Tensor
    """[n] float32, of the token's trajectory."""
    weights: torch.Tensor
    """[n] float32, share of the token in the loss of the batch (learner/aggregation.py)."""
    lags: torch.Tensor
    """[n] float32, version being trained minus version that sampled the token."""
    lengths: torch.Tensor
    """[m] int64, tokens in the loss of each trajectory, at least one; none in a row without any trajectory."""
    groups: torch.Tensor
    """[m] int64, group of each trajectory."""

    def to(self, device: torch.device) -> "Row":
        """The same row on a device."""
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), torch.Tensor)}
        return replace(self, **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()})


def lay_out(
    batch: Batch, advantages: NDArray[np.float32], weights: NDArray[np.float32], *, multiple_of: int = 1
) -> list[Row]:
    """Exactly `batch.num_microbatches` rows of this rank, in order and in host memory.

    A row that holds no trajectory in the loss has two tokens and none in the loss, so that this rank takes part in every
    collective of the others (invariant 9).

    Args:
        batch: this rank's part, which `check` has let pass.
        advantages: [N] float32, of the whole batch.
        weights: [N] float32, of each token of a trajectory; trajectories of weight 0 are left out.
        multiple_of: rows are filled up to a multiple of so many tokens by a last trajectory without a token in the
            loss, so that compiled code meets few lengths.
    """
    tokens = np.split(batch.token_ids, offsets(batch.prompt_lengths + batch.lengths)[1:-1])
    lags = lags_of(batch)
    contents: list[list[int]] = [[] for _ in range(batch.num_microbatches)]
    trained = (weights > 0) & (batch.all_loss_tokens > 0)
    for mine in np.flatnonzero(trained[batch.trajectory]):
        contents[batch.microbatch[mine]].append(int(mine))
    answers = offsets(batch.lengths)

    def row(members: list[int]) -> Row:
        pieces = [tokens[i] for i in members]
        total = sum(map(len, pieces))
        filler = -total % multiple_of if members else max(MIN_TOKENS, multiple_of)
        lengths = [len(piece) for piece in pieces] + ([filler] if filler else [])
        starts = offsets(lengths)
        chosen = [answers[i] + np.flatnonzero(batch.loss_mask[answers[i] : answers[i + 1]]) for i in members]
        # an answer's first token is predicted from the prompt's last
        kept = [
            first + batch.prompt_lengths[i] - 1 + at - answers[i]
            for i, first, at in zip(members, starts, chosen, strict=False)
        ]
        of_token = joined(chosen)
        ids = np.concatenate([*pieces, np.full(filler, PAD_ID, np.int32)]).astype(np.int64)
        positions = joined(kept)
        counts = np.array([len(at) for at in chosen], np.int64)
        whole = batch.trajectory[members]
        return Row(
            input_ids=torch.from_numpy(ids)[None],
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            starts=torch.from_numpy(starts.astype(np.int32)),
            longest=max(lengths),
            kept=torch.from_numpy(positions),
            targets=torch.from_numpy(ids[positions + 1]),
            behaviour_logprobs=torch.from_numpy(batch.logprobs[of_token].astype(np.float32)),
            advantages=torch.from_numpy(np.repeat(advantages[whole], counts)),
            weights=torch.from_numpy(np.repeat(weights[whole], counts)),
            lags=torch.from_numpy(lags[of_token].astype(np.float32)),
            lengths=torch.from_numpy(counts),
            groups=torch.from_numpy(batch.all_groups[whole].astype(np.int64)),
        )

    return [row(members) for members in contents]


def joined(parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """All parts one after the other; empty without any."""
    return np.concatenate([np.zeros(0, np.int64), *parts])


def offsets(lengths: NDArray[Any] | Sequence[int]) -> NDArray[np.int64]:
    """[n+1] where each of n consecutive pieces begins, then the total."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def lags_of(batch: Batch) -> NDArray[np.int32]:
    """[answer tokens] version being trained minus version that sampled; 0 outside the loss."""
    return np.where(batch.loss_mask != 0, batch.step - 1 - batch.versions, 0)
