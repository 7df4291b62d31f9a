"""Overlong answers (DAPO, 2503.14476): punished near the limit, or out of the loss.

Applied when a batch is formed, to the groups as the journal has them: what is trained follows from journal and
configuration alone, and which trajectories are trained, and where, from the shaped rewards. Dynamic sampling looks at
the rewards before, as in DAPO: a length is no success.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from configs.algorithm import Algorithm
from replay.batches.build import samples_of
from replay.messages import Group

CUT = "length"
"""Finish reason of an answer that ended at the limit."""


def shape(groups: Sequence[Group], algorithm: Algorithm, limit: int) -> tuple[list[Group], dict[str, float]]:
    """The groups as they are trained, and what was done to them, for metrics.jsonl.

    Args:
        groups: of a batch.
        algorithm: of the run.
        limit: rollout.max_new_tokens.
    """
    if not algorithm.overlong_buffer and not algorithm.overlong_filter:
        return list(groups), {}
    raw = np.concatenate([group.rewards for group in groups])
    measured = {"critic/score/mean": float(raw.mean())}
    shaped = list(groups)
    if algorithm.overlong_buffer:
        costs = [penalty(_longest(group), algorithm, limit) for group in groups]
        shaped = [
            replace(g, rewards=(g.rewards - cost).astype(np.float32)) for g, cost in zip(groups, costs, strict=True)
        ]
        cost = np.concatenate(costs)
        measured |= {
            "reward/overlong_penalty": float(cost.mean()),
            "reward/overlong_ratio": float((cost > 0).mean()),
        }
    if algorithm.overlong_filter:
        cut = [np.array([reason == CUT for reason in group.finish_reasons]) for group in groups]
        shaped = [_without(group, which) for group, which in zip(shaped, cut, strict=True)]
        measured["reward/overlong_filtered"] = float(np.concatenate(cut).mean())
    return shaped, measured


def penalty(lengths: NDArray[np.int32], algorithm: Algorithm, limit: int) -> NDArray[np.float64]:
    """[n] what each trajectory loses: 0 up to limit - buffer tokens, then more with each up to overlong_penalty.

    DAPO, equation 13, with verl's factor: min(-(length - (limit - buffer)) / buffer * penalty, 0) joins the reward.
    """
    above = np.maximum(lengths.astype(np.float64) - (limit - algorithm.overlong_buffer), 0)
    return above / algorithm.overlong_buffer * algorithm.overlong_penalty


def _longest(group: Group) -> NDArray[np.int32]:
    """[n] tokens of the longest sample of each trajectory: that is what the limit bounds."""
    samples = group.samples
    return np.maximum.reduceat(group.lengths, np.cumsum(samples) - samples) if samples.size else group.lengths


def _without(group: Group, which: NDArray[np.bool_]) -> Group:
    """The group with these answers out of the loss."""
    if not which.any():
        return group
    of_samples = np.repeat(which, samples_of(group))
    return replace(group, loss_mask=np.where(np.repeat(of_samples, group.lengths), np.uint8(0), group.loss_mask))
