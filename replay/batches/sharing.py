"""Shared prompts: when they pay, and placement of their groups. Pure, no torch.

Replay, which assigns trajectories to microbatches, and the learner, which lays them out, both ask here.

It saves the prompt's tokens, in every layer, for each answer that shares it but one. It costs copies: attention is
given the keys and values of prompt and answer one after the other, and their gradients are added up again. In dense
decoders a copied position costs about 1/COPIES_PER_TOKEN of a token: in memory, keys and values over everything that
a layer keeps (.05 to .12; .15 where every head has keys of its own); in time, bytes that are moved over products of a
layer (by arithmetic about .1 at 0.6B parameters on an H100, .03 at 1.7B, less above).

So with 8 copies to a token, an answer of a tokens to a prompt of p gains 8p - (p + a) eighths of a token by sharing,
and the p tokens that are computed after all must be earned first: answers of less than 7p tokens share, where together
they gain more than 8p. For k equal answers that is a < 7p - 8p/k: below 6p in a group of 8, below 3p in a group of 2.
"""

import heapq
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from replay.batches import build as batches
from replay.messages import Group

Wanted = Literal["auto"] | bool
"""learner.share_prefixes."""
Int64 = NDArray[np.int64]
COPIES_PER_TOKEN = 8
WHOLE, SPREAD = (1.0, 0.9, 0.8, 0.5), 2
"""Shares of a batch that `assign` tries to keep in whole groups, and bins that each other group is dealt out to."""
SHORTEST = 64
"""Prompt tokens from which `auto` shares: below, a kernel's tile of queries is not even full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """N trajectories of a batch, as an assignment sees them."""

    prompts: Int64
    """[N] tokens of the prompt."""
    answers: Int64
    """[N] tokens of the answer."""
    groups: Int64
    """[N] number of the group, or of what shares a prompt, from 0, ascending."""
    trained: NDArray[np.bool_]
    """[N] whether the learner computes anything for it."""

    @classmethod
    def of(cls, groups: list[Group], trained: NDArray[np.bool_]) -> "Members":
        """Those of whole groups, in order."""
        return cls(
            prompts=np.concatenate([batches.prompts_of(group).astype(np.int64) for group in groups]),
            answers=np.concatenate([group.lengths.astype(np.int64) for group in groups]),
            groups=_families(groups),
            trained=trained,
        )


def _families(groups: list[Group]) -> Int64:
    """[N] number of what each sample may share its prompt with: its group, or with a prompt of its own nothing."""
    sizes = [group.lengths.size for group in groups]
    alone = np.repeat([group.prompt_lengths.size > 0 for group in groups], sizes)
    of_group = np.repeat(np.arange(len(groups)), sizes)
    starts = alone | (np.diff(of_group, prepend=-1) > 0)
    families: Int64 = np.cumsum(starts) - 1
    return families


def sharers(wanted: Wanted, prompt: int, answers: Int64) -> NDArray[np.bool_]:
    """Which of the answers to one prompt, all in one microbatch, share it. None, or two and more.

    Args:
        wanted: `auto` is where it pays, see above; True is all of several.
        prompt: its tokens.
        answers: [k] their tokens.
    """
    gain = _gain(np.int64(prompt), answers)
    if wanted != "auto":
        return np.full(len(answers), wanted and len(answers) > 1)
    pays = prompt >= SHORTEST and int(gain[gain > 0].sum()) > COPIES_PER_TOKEN * prompt
    return (gain > 0) & pays


def assign_minibatches(
    groups: list[Group],
    trained: NDArray[np.bool_],
    wanted: Wanted,
    *,
    num_ranks: int,
    max_tokens: int,
    number: int,
    whole: bool = False,
) -> tuple[batches.Assignment, list[list[int]]]:
    """`assign` for each of `number` mini-batches of whole groups, the oldest first, whose sizes differ by one at most.

    With `whole` all of a group lies in one microbatch, and nothing is shared.

    Returns:
        The assignment of all samples, whose microbatches count on from one mini-batch to the next; and of each
        mini-batch its groups and its microbatches.
    """
    assigned, minibatches, first = list[batches.Assignment](), list[list[int]](), 0
    for chosen in np.array_split(np.arange(len(groups)), number):
        part = groups[chosen[0] : chosen[-1] + 1]
        here = trained[first : first + sum(group.lengths.size for group in part)]
        members = Members.of(part, here)
        found = (
            _assign_whole(part, members, num_ranks, max_tokens)
            if whole
            else assign(members, wanted, num_ranks, max_tokens)
        )
        assigned.append(replace(found, microbatch=found.microbatch + sum(count for _, count in minibatches)))
        minibatches.append([len(part), found.num_microbatches])
        first += len(here)
    rank, microbatch = (np.concatenate([getattr(one, name) for one in assigned]) for name in ("rank", "microbatch"))
    return batches.Assignment(rank, microbatch, sum(count for _, count in minibatches)), minibatches


def _assign_whole(groups: list[Group], members: Members, num_ranks: int, max_tokens: int) -> batches.Assignment:
    sizes = [group.lengths.size for group in groups]
    starts = np.cumsum([0, *sizes[:-1]])
    lengths = np.add.reduceat(members.prompts + members.answers, starts)
    found = batches.assign(lengths, np.ones(len(groups), np.bool_), num_ranks, max_tokens)
    return replace(found, rank=np.repeat(found.rank, sizes), microbatch=np.repeat(found.microbatch, sizes))


def assign(members: Members, wanted: Wanted, num_ranks: int, max_tokens: int) -> batches.Assignment:
    """`batches.assign`, with the answers of a group kept together where the step gets faster by it.

    A microbatch costs its tokens and copies. Most groups stay whole, the smaller ones are dealt out to even up what is
    left; of several ways to do so, and of the one that keeps nothing together, that is taken in which the slowest
    rank's costs, added up over the microbatches, are least. So ranks may be less alike than without sharing, but never
    at the price of time.

    Args:
        members: trajectories of the batch.
        wanted: learner.share_prefixes.
        num_ranks: data-parallel ranks, at most N.
        max_tokens: that a microbatch may cost; a longer trajectory has one of its own.
    """
    lengths, trained = members.prompts + members.answers, members.trained
    units = _units(members, wanted)
    apart = batches.assign(lengths, trained, num_ranks, max_tokens)
    if all(unit.gains is None for unit in units):
        return apart
    ways = [_dealt(units, len(lengths), share, num_ranks, max_tokens) for share in WHOLE]
    times = [float(loads.max(1).sum()) for _, loads in ways]
    best = int(np.argmin(times))
    if wanted == "auto":  # with True answers that happen to meet share as well, and cost more than is counted here
        places = (apart.microbatch[trained], apart.rank[trained])
        loads = np.zeros((apart.num_microbatches, num_ranks))
        np.add.at(loads, places, lengths[trained])
        if loads.max(1).sum() <= times[best]:
            return apart
    bins, loads = ways[best]
    return batches.placed(bins, trained, num_ranks, len(loads))


@dataclass(frozen=True, slots=True)
class _Unit:
    """The answers of a group that share where they meet, or one answer that does not."""

    prompt: int
    members: list[int]
    """Of the batch, the longest first."""
    answers: list[int]
    gains: list[int] | None
    """See _gain; none for an answer that shares nothing."""
    forced: bool

    def cost(self, answers: int, gain: int, count: int) -> int:
        """Of `count` members in one microbatch, whose answers and gains have these sums."""
        if self.gains is None or count < 2:
            return count * self.prompt + answers
        saved = (gain - COPIES_PER_TOKEN * self.prompt) // COPIES_PER_TOKEN
        return count * self.prompt + answers - (saved if self.forced else max(0, saved))

    @property
    def whole(self) -> int:
        """Cost of all in one microbatch."""
        return self.cost(sum(self.answers), sum(self.gains or ()), len(self.answers))


def _units(members: Members, wanted: Wanted) -> list[_Unit]:
    """Of all trained trajectories, the most expensive first."""
    units = []
    order = np.flatnonzero(members.trained)
    order = order[np.lexsort((-members.answers[order], members.groups[order]))]
    for group in np.split(order, np.flatnonzero(np.diff(members.groups[order])) + 1):
        if not group.size:
            continue
        prompt, answers = int(members.prompts[group[0]]), members.answers[group]
        # an answer that does not share with the whole group in its microbatch does not with a part of it
        joins, gains = sharers(wanted, prompt, answers), _gain(np.int64(prompt), answers)
        if joins.any():
            chosen = (group[joins].tolist(), answers[joins].tolist(), gains[joins].tolist())
            units.append(_Unit(prompt, *chosen, forced=wanted is True))
        alone = zip(group[~joins].tolist(), answers[~joins].tolist(), strict=True)
        units += [_Unit(prompt, [member], [answer], None, forced=False) for member, answer in alone]
    return sorted(units, key=lambda unit: -unit.whole)


def _dealt(
    units: list[_Unit], total: int, share: float, num_ranks: int, max_tokens: int
) -> tuple[Int64, NDArray[np.float64]]:
    """[N] bin of each trajectory, and [microbatches, ranks] what they cost. As few microbatches as hold everything.

    The most expensive units, up to `share` of all costs, are kept whole while there is room.
    """
    every = sum(unit.whole for unit in units)
    number = max(1, -(-every // (num_ranks * max_tokens)))
    while True:
        bins, loads = np.zeros(total, np.int64), [0] * (num_ranks * number)
        for unit in units:
            spread = 1 if sum(loads) < share * every else SPREAD
            if not _place(unit, bins, loads, spread, max_tokens):
                break
        else:
            costs = np.array(loads, np.float64)
            order = np.argsort(-costs, kind="stable")  # bins that are alike meet in a microbatch
            return np.argsort(order)[bins], costs[order].reshape(number, num_ranks)
        number += 1 + number // 16  # a search over many microbatches may not take long


def _place(unit: _Unit, bins: Int64, loads: list[int], spread: int, limit: int) -> bool:
    """Add each member of a unit to the one of the `spread` emptiest bins that has least with it.

    Bins past those take what has no room there. False where all are full.
    """
    emptiest = heapq.nsmallest(len(unit.members), range(len(loads)), key=loads.__getitem__)
    there = dict.fromkeys(emptiest, (0, 0, 0))
    for member, answer, gain in zip(unit.members, unit.answers, unit.gains or [0], strict=True):
        chosen, least = -1, 0
        for tried, number in enumerate(emptiest):
            if tried >= spread and chosen >= 0:
                break
            answers, gains, count = there[number]
            load = loads[number] + unit.cost(answers + answer, gains + gain, count + 1) - unit.cost(*there[number])
            if (load <= limit or not loads[number]) and (chosen < 0 or load < least):
                chosen, least = number, load
        if chosen < 0:
            return False
        answers, gains, count = there[chosen]
        there[chosen], loads[chosen], bins[member] = (answers + answer, gains + gain, count + 1), least, chosen
    return True


def _gain(prompt: np.int64, answers: Int64) -> Int64:
    """By sharing, in tokens / COPIES_PER_TOKEN, before the prompt itself is paid for."""
    return (COPIES_PER_TOKEN - 1) * prompt - answers
