"""From the groups of one step to one Batch message per learner rank. Pure and deterministic.

Replay decides which rank gets which trajectory and in which microbatch, so that all ranks run the same
number of microbatches and no rank is alone in a collective (invariant 9).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.messages import Batch, Group

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Rank and microbatch of each of the N trajectories, and the number of microbatches of every rank."""

    rank: Int32
    microbatch: Int32
    num_microbatches: int


def assign(lengths: NDArray[np.int64], num_ranks: int, max_tokens: int) -> Assignment:
    """Spread N trajectories over ranks and microbatches.

    The longest come first and go to the rank with the fewest tokens that still has room for one of its
    N / num_ranks (rounded up). Inside a rank, trajectories of similar length share a microbatch of at most `max_tokens`
    padded tokens.

    `lengths` is [N], prompt + answer tokens of each trajectory; there are at most N data-parallel ranks; `max_tokens`
    bounds rows × longest row of a microbatch.
    """
    order = np.argsort(-lengths, kind="stable")
    rank = np.zeros(len(lengths), dtype=np.int32)
    microbatch = np.zeros(len(lengths), dtype=np.int32)
    share = -(-len(lengths) // num_ranks)
    loads, counts = [0] * num_ranks, [0] * num_ranks
    # Per rank: index of the open microbatch, its rows, and its longest row (the first, as rows get shorter).
    opened, rows, longest = [-1] * num_ranks, [0] * num_ranks, [0] * num_ranks
    for i in order.tolist():
        length = int(lengths[i])
        r = min((r for r in range(num_ranks) if counts[r] < share), key=lambda r: (loads[r], r))
        if opened[r] < 0 or (rows[r] + 1) * longest[r] > max_tokens:
            opened[r], rows[r], longest[r] = opened[r] + 1, 0, length
        rank[i], microbatch[i] = r, opened[r]
        rows[r] += 1
        loads[r] += length
        counts[r] += 1
    return Assignment(rank, microbatch, max(opened) + 1)


def build(
    step: int, groups: list[Group], assignment: Assignment, *, num_ranks: int, stats: dict[str, float]
) -> list[Batch]:
    sizes = [g.lengths.size for g in groups]
    lengths = np.concatenate([g.lengths for g in groups])
    prompt_lengths = np.repeat(np.array([g.prompt_ids.size for g in groups], dtype=np.int32), sizes)
    masks = [np.add.reduceat(g.loss_mask, _starts(g.lengths), dtype=np.int32) for g in groups]
    loss_tokens, rewards = np.concatenate(masks), np.concatenate([g.rewards for g in groups])
    all_groups = np.repeat(np.arange(len(groups), dtype=np.int32), sizes)
    lag = _lag(step, groups)
    stats = stats | _stats(groups, lengths, prompt_lengths, lag)
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
                trajectory=mine,
                microbatch=assignment.microbatch[mine],
                prompt_lengths=prompt_lengths[mine],
                lengths=lengths[mine],
                all_rewards=rewards,
                all_groups=all_groups,
                all_loss_tokens=loss_tokens,
                **_tokens(groups, mine),
            )
        )
    return batches


def total_lengths(groups: list[Group]) -> NDArray[np.int64]:
    """[N] prompt + answer tokens of each trajectory."""
    return np.concatenate([g.lengths.astype(np.int64) + g.prompt_ids.size for g in groups])


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
    """Token arrays of one rank's trajectories, concatenated in the order of `mine`."""
    token_ids: list[Int32] = []
    pieces: list[tuple[Group, slice]] = []
    starts = [[*_starts(g.lengths).tolist(), g.token_ids.size] for g in groups]
    size = groups[0].lengths.size
    for i in mine.tolist():
        number, k = divmod(i, size)
        group = groups[number]
        start, end = starts[number][k : k + 2]
        token_ids += [group.prompt_ids, group.token_ids[start:end]]
        if pieces and pieces[-1][0] is group and pieces[-1][1].stop == start:  # one copy for neighbours
            start = pieces.pop()[1].start
        pieces.append((group, slice(start, end)))
    rest = ("loss_mask", "logprobs", "versions")
    return {"token_ids": np.concatenate(token_ids)} | {
        name: np.concatenate([getattr(group, name)[piece] for group, piece in pieces]) for name in rest
    }


def _stats(groups: list[Group], lengths: Int32, prompt_lengths: Int32, lag: dict[int, int]) -> dict[str, float]:
    rewards = np.stack([g.rewards for g in groups])
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
        "reward/flat_groups_ratio": float((rewards.max(axis=1) == rewards.min(axis=1)).mean()),
        "training/epoch": float(max(g.pass_ for g in groups)),
    }
    for name in sorted({name for g in groups for name in g.reward_metrics}):
        values = [g.reward_metrics[name] for g in groups if name in g.reward_metrics]
        stats[f"reward/{name.removeprefix('reward/')}"] = float(np.mean(values))
    return stats
