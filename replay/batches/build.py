"""From the groups of one step to one Batch message per learner rank. Pure and deterministic.

Replay decides which rank gets which trajectory and in which microbatch, so that all ranks run the same
number of microbatches and no rank is alone in a collective (invariant 9).
"""

import heapq
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay import routing, scores
from replay.messages import Batch, Group

Int32 = NDArray[np.int32]
OF_SAMPLING = (
    *("critic/", "reward/", "rollout/", "answers/", "timing_s/gen", "training/off_policy/"),
    "response_length/clip_ratio",
)
"""Beginnings of the names of metrics that speak of sampled answers."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Rank and microbatch of each of the N trajectories, and the number of microbatches of every rank."""

    rank: Int32
    microbatch: Int32
    num_microbatches: int


@dataclass(frozen=True, slots=True)
class Beside:
    """Groups of learner.sft, which get microbatches of their own behind the others."""

    groups: list[Group] = field(default_factory=list)
    max_tokens: int = 0

    def assigned(self, others: Assignment, num_ranks: int) -> Assignment:
        """The assignment of the others and of these."""
        lengths = np.array([g.prompt_ids.size + g.token_ids.size for g in self.groups], np.int64)
        own = assign(lengths, np.ones(len(lengths), np.bool_), num_ranks, self.max_tokens)
        return Assignment(
            np.concatenate([others.rank, own.rank]),
            np.concatenate([others.microbatch, own.microbatch + np.int32(others.num_microbatches)]),
            others.num_microbatches + own.num_microbatches,
        )


def assign(lengths: NDArray[np.int64], trained: NDArray[np.bool_], num_ranks: int, max_tokens: int) -> Assignment:
    """Spread N trajectories over ranks and microbatches, so that all microbatches are about equally long.

    There are as few microbatches as hold all tokens. The longest trajectory comes first, each goes to the microbatch
    with the fewest tokens (LPT, Graham 1969); ranks meet in every microbatch, so what counts is that those of the same
    number are alike. Trajectories that are not trained cost nothing and are dealt out by turns.

    Args:
        lengths: [N] prompt + answer tokens of each sample.
        trained: [N] bool, whether the learner computes anything for it.
        num_ranks: data-parallel ranks, at most N.
        max_tokens: most tokens of a microbatch; a longer sample has one of its own.
    """
    order = np.flatnonzero(trained)[np.argsort(-lengths[trained], kind="stable")]
    number = max(1, -(-int(lengths[order].sum()) // (num_ranks * max_tokens)))
    while (bins := _fill(lengths, order, num_ranks * number, max_tokens)) is None:
        number += 1
    return placed(bins, trained, num_ranks, number)


def placed(bins: NDArray[np.int64], trained: NDArray[np.bool_], num_ranks: int, number: int) -> Assignment:
    """Trained trajectories in their bins, those of each microbatch one after the other; the others by turns."""
    bins[~trained] = np.arange((~trained).sum()) % num_ranks
    return Assignment((bins % num_ranks).astype(np.int32), (bins // num_ranks).astype(np.int32), number)


def _fill(lengths: NDArray[np.int64], order: NDArray[np.int64], bins: int, limit: int) -> NDArray[np.int64] | None:
    """[N] bin of each trajectory in `order`, or None where that many bins do not hold them."""
    chosen = np.zeros(len(lengths), dtype=np.int64)
    loads = [(0, number) for number in range(bins)]  # a heap
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        load, number = loads[0]
        if load and load + length > limit:
            return None
        heapq.heapreplace(loads, (load + length, number))
        chosen[i] = number
    return chosen


def build(
    step: int,
    groups: list[Group],
    assignment: Assignment,
    *,
    num_ranks: int,
    stats: dict[str, float],
    sampled: bool = True,
    beside: Beside | None = None,
) -> list[Batch]:
    """Each rank's part. Without `sampled` the answers are the data's, and nothing is told of rewards and engines."""
    lag, told, taught = _lag(step, groups), groups, [0, 0]
    if beside is not None and beside.groups:
        before, assignment = assignment.num_microbatches, beside.assigned(assignment, num_ranks)
        groups, taught = [*groups, *beside.groups], [len(beside.groups), assignment.num_microbatches - before]
    sizes, lengths = [g.rewards.size for g in groups], np.concatenate([g.lengths for g in groups])
    prompt_lengths = np.concatenate([prompts_of(g) for g in groups])
    masks = [np.add.reduceat(g.loss_mask, _starts(g.lengths), dtype=np.int32) for g in groups]
    samples = all_samples(groups)
    owner = np.repeat(np.arange(sum(sizes), dtype=np.int32), samples) if samples.size else None
    loss_tokens, rewards = np.concatenate(masks), np.concatenate([g.rewards for g in groups])
    if samples.size:
        loss_tokens = np.add.reduceat(loss_tokens, _starts(samples), dtype=np.int32)
    all_groups = np.repeat(np.arange(len(groups), dtype=np.int32), sizes)
    of_told = slice(sum(g.lengths.size for g in told))
    stats = _stats(told, lengths[of_told], prompt_lengths[of_told], lag) | stats
    if beside is not None and taught[0]:
        stats["sft/rows"] = float(taught[0])
        stats["perf/total_num_tokens"] = float(lengths.sum() + prompt_lengths.sum())
    if not sampled:
        stats = {name: value for name, value in stats.items() if not name.startswith(OF_SAMPLING)}
    batches = []
    for r in range(num_ranks):
        mine = np.flatnonzero(assignment.rank == r).astype(np.int32)
        batches.append(
            Batch(
                step=step,
                rank=r,
                num_microbatches=assignment.num_microbatches,
                total_loss_tokens=int(loss_tokens.sum(dtype=np.int64)),
                group_ids=[[g.pass_, g.index] for g in groups],
                stats=stats,
                lag_histogram={str(lag): count for lag, count in lag.items()},
                trajectory=mine if owner is None else owner[mine],
                microbatch=assignment.microbatch[mine],
                prompt_lengths=prompt_lengths[mine],
                lengths=lengths[mine],
                all_rewards=rewards,
                all_groups=all_groups,
                all_loss_tokens=loss_tokens,
                all_samples=samples,
                taught=taught,
                **_tokens(groups, mine),
                **_pictures(groups, mine),
            )
        )
    return batches


def prompts_of(group: Group) -> Int32:
    """[S] prompt tokens of each sample."""
    own = group.prompt_lengths
    return own if own.size else np.full(group.lengths.size, group.prompt_ids.size, np.int32)


def samples_of(group: Group) -> Int32:
    """[n] samples of each trajectory."""
    return group.samples if group.samples.size else np.ones(group.rewards.size, np.int32)


def all_samples(groups: list[Group]) -> Int32:
    """[N] samples of each trajectory of a batch; empty where each has one."""
    if all(g.lengths.size == g.rewards.size for g in groups):
        return np.empty(0, np.int32)
    return np.concatenate([samples_of(g) for g in groups])


def trained(groups: list[Group], *, flat: bool) -> NDArray[np.bool_]:
    """[N] samples that the learner computes anything for: with a token in the loss, and of groups of equal rewards
    only with `flat`."""
    counted = [flat or g.rewards.min() < g.rewards.max() for g in groups]
    in_loss: NDArray[np.bool_] = np.concatenate(
        [np.add.reduceat(g.loss_mask, _starts(g.lengths), dtype=np.int32) > 0 for g in groups]
    )
    in_loss &= np.repeat(np.array(counted), [g.lengths.size for g in groups])
    return in_loss


def in_the_loss(group: Group, values: NDArray[Any]) -> NDArray[Any]:
    """[tokens in the loss] of a token array; the array itself, uncopied, where every token is in the loss."""
    return values if group.loss_mask.min() else values[group.loss_mask != 0]


def _lag(step: int, groups: list[Group]) -> dict[int, int]:
    """Tokens in the loss by their lag in `step`, the smallest lag first."""
    sampled = [in_the_loss(g, g.versions) for g in groups]
    oldest = min((int(versions.min()) for versions in sampled if versions.size), default=0)
    counts: Counter[int] = Counter()
    for versions in sampled:
        for above, count in enumerate(np.bincount(versions - np.int32(oldest)).tolist()):
            counts[step - 1 - oldest - above] += count
    return {lag: counts[lag] for lag in sorted(counts) if counts[lag]}


def _starts(lengths: Int32) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)])


def _tokens(groups: list[Group], mine: Int32) -> dict[str, Any]:
    """Token arrays of one rank's samples, concatenated in the order of `mine`."""
    token_ids: list[Int32] = []
    pieces: list[tuple[Group, slice]] = []
    samples: list[tuple[Group, int, slice]] = []
    starts = [[*_starts(g.lengths).tolist(), g.token_ids.size] for g in groups]
    first = _starts(np.array([g.lengths.size for g in groups], np.int32)).tolist()
    for i in mine.tolist():
        number = bisect_right(first, i) - 1
        group, k = groups[number], i - first[number]
        start, end = starts[number][k : k + 2]
        samples.append((group, k, slice(start, end)))
        token_ids += [_prompt(group, k), group.token_ids[start:end]]
        if pieces and pieces[-1][0] is group and pieces[-1][1].stop == start:  # one copy for neighbours
            start = pieces.pop()[1].start
        pieces.append((group, slice(start, end)))
    nothing = groups[0]  # where answers were left out, there may be more ranks than answers
    arrays = {
        name: np.concatenate([getattr(nothing, name)[:0], *(getattr(group, name)[piece] for group, piece in pieces)])
        for name in ("loss_mask", "logprobs", "versions")
    }
    arrays["token_ids"] = np.concatenate([nothing.token_ids[:0], *token_ids])
    return arrays | routing.of_samples(samples) | scores.of_samples(samples)


def _pictures(groups: list[Group], mine: Int32) -> dict[str, Any]:
    """Pictures of the groups that one rank has samples of."""
    here = np.zeros(len(groups), np.bool_)
    here[np.repeat(np.arange(len(groups)), [g.lengths.size for g in groups])[mine]] = True
    shown = [group if is_here else None for group, is_here in zip(groups, here.tolist(), strict=True)]
    counts = np.array([0 if group is None else len(group.pictures) for group in shown], np.int32)
    if not counts.any():
        return {}
    return {
        "pictures": [reference for group in shown if group is not None for reference in group.pictures],
        "picture_bytes": np.concatenate([group.picture_bytes for group in shown if group is not None]),
        "picture_counts": counts,
    }


def _prompt(group: Group, sample: int) -> Int32:
    if not group.prompt_lengths.size:
        return group.prompt_ids
    end = int(group.prompt_lengths[: sample + 1].sum())
    return group.prompt_ids[end - int(group.prompt_lengths[sample]) : end]


def _stats(groups: list[Group], lengths: Int32, prompt_lengths: Int32, lag: dict[int, int]) -> dict[str, float]:
    if (samples := all_samples(groups)).size:
        lengths = np.add.reduceat(lengths, _starts(samples), dtype=np.int32)
    rewards = np.concatenate([g.rewards for g in groups])
    num_tokens = sum(lag.values())
    reasons = [reason for g in groups for reason in g.finish_reasons]
    stats = {
        "critic/score/mean": float(rewards.mean()),
        "critic/rewards/mean": float(rewards.mean()),
        "critic/rewards/max": float(rewards.max()),
        "critic/rewards/min": float(rewards.min()),
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/min": float(lengths.min()),
        "response_length/clip_ratio": reasons.count("length") / len(reasons),
        "prompt_length/mean": float(prompt_lengths.mean()),
        "prompt_length/max": float(prompt_lengths.max()),
        "timing_s/gen": max(g.generate_s for g in groups),
        "perf/total_num_tokens": float(lengths.sum() + prompt_lengths.sum()),
        "training/off_policy/trajectory_staleness/mean": sum(n * d for d, n in lag.items()) / max(1, num_tokens),
        "training/off_policy/trajectory_staleness/max": float(max(lag, default=0)),
        "reward/flat_groups_ratio": float(np.mean([np.ptp(g.rewards) == 0 for g in groups])),
        "training/epoch": float(max(g.pass_ for g in groups)),
    }
    for name in sorted({name for g in groups for name in g.reward_metrics}):
        told = groups if name.startswith("episode/") else [g for g in groups if name in g.reward_metrics]
        values = [g.reward_metrics.get(name, 0.0) for g in told]
        rest = name.removeprefix("reward/").removeprefix("episode/")
        stats[f"episode/{rest}" if name.startswith("episode/") else f"reward/{rest}"] = float(np.mean(values))
    return stats
