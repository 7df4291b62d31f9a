"""Prompts that answers share in a row: token layout and inputs of attention.

A row begins with whole trajectories and with the prompts that are shared; the answers to these follow. What stands in
the first part attends within itself. An answer attends to a copy of its prompt's keys and values, with its own after
them, so a kernel that aligns its causal mask to the last query and key needs to know nothing of it. Gradients of the
copies are added up where they were copied from. Every other part of a layer looks at one token at a time, and knows
its place from `position_ids`: so all that is left out is computing the same prompt again.

The same as in verl (PR 4368) and TRL 1.16, without padding. When it pays: replay/batches/sharing.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replay.batches.sharing import Wanted, sharers


class Prefixes(NamedTuple):
    """The c answers of a row that share their prompts, for attention.

    Example: prompt [7, 8] with answers [9, 2] and [5] is the row [7, 8, 9, 2, 5] with first 2, starts [0, 2, 3],
    longest 2, copied [0, 1, 2, 3, 0, 1, 4], copy_starts [0, 4, 7] and longest_copy 4.
    """

    first: int
    """Position of the first of them."""
    starts: Tensor
    """[c+1] int32, first position of each answer, then their end, counted from `first`."""
    longest: int
    """Tokens of the longest answer."""
    copied: Tensor
    """[k] int64, positions whose keys and values each answer is given: of its prompt, then its own."""
    copy_starts: Tensor
    """[c+1] int32, where in `copied` those of each answer begin, then the total."""
    longest_copy: int
    """The most that one answer is given."""

    def to(self, device: torch.device) -> "Prefixes":
        """The same on a device."""
        moved: Any = (value.to(device, non_blocking=True) if torch.is_tensor(value) else value for value in self)
        return Prefixes(*moved)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of m trajectories stand in a row."""

    ids: NDArray[np.int64]
    """[total]"""
    positions: NDArray[np.int64]
    """[total], of each token in its trajectory."""
    starts: NDArray[np.int64]
    """[w+1] first position of each whole trajectory and each shared prompt, then their end."""
    longest: int
    """Of these."""
    before: list[int]
    """[m] position of the prompt's last token."""
    answers: list[int]
    """[m] position of the answer's first token."""
    prefixes: Prefixes | None
    """None where no prompt is shared."""
    saved: int
    """Tokens of the trajectories that need not be computed."""
    owners: NDArray[np.int64]
    """[total] the trajectory of each token; of a shared prompt, the first that shares it."""


def lay_side_by_side(
    pieces: Sequence[NDArray[np.int32]], prompts: Sequence[int], wanted: Wanted, seen: Sequence[bytes] | None = None
) -> Layout:
    """One row of trajectories.

    Args:
        pieces: m times [length], prompt then answer. Equal prompts are one prompt, whichever group they are of.
        prompts: [m] tokens of the prompt.
        wanted: learner.share_prefixes.
        seen: [m] what names the pictures of each prompt: prompts of the same tokens may show others.
    """
    leaders = _leaders(pieces, prompts, wanted, seen or [b""] * len(pieces))
    laid: list[NDArray[np.int32]] = []
    owners = [i for i in range(len(pieces)) if leaders.get(i, i) == i] + list(leaders)
    place = [0] * len(pieces)  # of a prompt
    answers = [0] * len(pieces)
    total = 0
    for i, piece in enumerate(pieces):
        if leaders.get(i, i) == i:
            laid.append(piece[: prompts[i]] if i in leaders else piece)
            place[i], answers[i] = total, total + prompts[i]
            total += len(laid[-1])
    num_whole, first = len(laid), total
    places = [np.arange(len(piece)) for piece in laid]
    copied: list[NDArray[np.int64]] = []
    for i, leader in leaders.items():
        place[i], answers[i] = place[leader], total
        laid.append(pieces[i][prompts[i] :])
        places.append(np.arange(prompts[i], len(pieces[i])))
        copied += [np.arange(prompts[i]) + place[i], np.arange(len(laid[-1])) + total]
        total += len(laid[-1])
    lengths = [len(piece) for piece in laid]
    return Layout(
        ids=np.concatenate(laid).astype(np.int64),
        positions=np.concatenate(places),
        starts=offsets(lengths[:num_whole]),
        longest=max(lengths[:num_whole]),
        before=[at + prompt - 1 for at, prompt in zip(place, prompts, strict=True)],
        answers=answers,
        prefixes=_prefixes(first, lengths[num_whole:], copied) if leaders else None,
        saved=sum(map(len, pieces)) - total,
        owners=np.repeat(owners, lengths),
    )


def _leaders(
    pieces: Sequence[NDArray[np.int32]], prompts: Sequence[int], wanted: Wanted, seen: Sequence[bytes]
) -> dict[int, int]:
    """Of each trajectory that shares its prompt, in order: the first one of those that share the same."""
    families: dict[tuple[bytes, bytes], list[int]] = {}
    for i, (piece, prompt) in enumerate(zip(pieces, prompts, strict=True)):
        families.setdefault((seen[i], piece[:prompt].tobytes()), []).append(i)
    leaders: dict[int, int] = {}
    for family in families.values():
        prompt = prompts[family[0]]
        sharing = sharers(wanted, prompt, np.array([len(pieces[i]) - prompt for i in family], np.int64))
        chosen = [i for i, shares in zip(family, sharing, strict=True) if shares]
        leaders |= dict.fromkeys(chosen, chosen[0] if chosen else 0)
    return dict(sorted(leaders.items()))


def _prefixes(first: int, answers: list[int], copied: list[NDArray[np.int64]]) -> Prefixes:
    copies = [len(prompt) + len(own) for prompt, own in zip(copied[::2], copied[1::2], strict=True)]
    return Prefixes(
        first=first,
        starts=torch.from_numpy(offsets(answers).astype(np.int32)),
        longest=max(answers),
        copied=torch.from_numpy(np.concatenate(copied)),
        copy_starts=torch.from_numpy(offsets(copies).astype(np.int32)),
        longest_copy=max(copies),
    )


def offsets(lengths: NDArray[Any] | Sequence[int]) -> NDArray[np.int64]:
    """[n+1] where each of n consecutive pieces begins, then the total."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, int], Tensor]
"""attend(query, key, value, starts, key_starts, longest, longest_key): causal attention within each segment, masks
aligned to its last query and key. Without `key_starts` keys lie as queries do."""


def attend(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    prefixes: Prefixes | None,
    *,
    dim: int,
) -> Tensor:
    """Attention over a row by a kernel: [total, heads, D].

    Args:
        kernel: returns [tokens, heads, D].
        query: as the kernel takes it, tokens along `dim`; key and value alike.
        starts: [w+1] int32, see Layout.
        longest: of the segments in `starts`.
        prefixes: of the row; None where no prompt is shared.
        dim: of tokens.
    """
    if prefixes is None:
        return kernel(query, key, value, starts, None, longest, longest)
    first, ends = prefixes.first, (prefixes.starts, prefixes.copy_starts, prefixes.longest, prefixes.longest_copy)
    q, k, v = (tensor.narrow(dim, 0, first) for tensor in (query, key, value))
    answers = query.narrow(dim, first, query.shape[dim] - first)
    # Gradients of copies of 16 bit are added up in float32. A GPU does so in any order, unless it has to be
    # deterministic: then torch sorts first.
    keys, values = (t.float().index_select(dim, prefixes.copied).to(t.dtype) for t in (key, value))
    return torch.cat([kernel(q, k, v, starts, None, longest, longest), kernel(answers, keys, values, *ends)])
