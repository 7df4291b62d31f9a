"""Overlong answers: what they lose, which leave the loss, and that replay deals out what is left."""

import numpy as np
import pytest

from configs.algorithm import Algorithm
from replay import messages as m
from replay.batches.build import build, trained
from replay.batches.overlong import shape
from replay.batches.sharing import Members, assign
from tests.replay.simulation.samples import make_group

LIMIT = 20
LENGTHS = (20, 18, 12, 3)
REASONS = ["length", "stop", "stop", "stop"]


def group(rewards: list[float], index: int = 0) -> m.Group:
    return make_group(LENGTHS, index=index, finish_reasons=REASONS, rewards=np.array(rewards, np.float32))


def test_the_punishment_grows_over_the_last_tokens_before_the_limit() -> None:
    """verl's formula, written out: min(-(length - (limit - buffer)) / buffer * factor, 0)."""
    algorithm = Algorithm(overlong_buffer=8, overlong_penalty=0.5)
    (shaped,), measured = shape([group([1, 0, 1, 0])], algorithm, LIMIT)
    wanted = [r + min(-(n - (20 - 8)) / 8 * 0.5, 0) for r, n in zip([1, 0, 1, 0], LENGTHS, strict=True)]
    assert shaped.rewards.tolist() == pytest.approx(wanted) and wanted[0] == 0.5 and wanted[2] == 1.0
    assert shaped.rewards.dtype == np.float32
    assert measured == pytest.approx(
        {"critic/score/mean": 0.5, "reward/overlong_penalty": (0.5 + 0.375) / 4, "reward/overlong_ratio": 0.5}
    )


def test_answers_that_were_cut_leave_the_loss_and_keep_their_reward() -> None:
    (shaped,), measured = shape([group([1, 0, 1, 0])], Algorithm(overlong_filter=True), LIMIT)
    assert np.add.reduceat(shaped.loss_mask, [0, 20, 38, 50]).tolist() == [0, 18, 12, 3]
    assert shaped.rewards.tolist() == [1, 0, 1, 0] and measured["reward/overlong_filtered"] == 0.25


def test_a_group_that_only_lengths_tell_apart_is_trained_and_cut_answers_cost_nothing() -> None:
    groups = [group([1, 1, 1, 1]), group([1, 0, 0, 0], index=1)]
    shaped, measured = shape(groups, Algorithm(overlong_buffer=8, overlong_filter=True), LIMIT)
    assert not trained(groups, flat=False)[:4].any()
    assert trained(shaped, flat=False).tolist() == [False, True, True, True] * 2
    placed = assign(Members.of(shaped, trained(shaped, flat=False)), False, 2, 64)
    parts = build(1, shaped, placed, num_ranks=2, stats=measured)
    assert parts[0].stats["critic/score/mean"] == 0.625 > parts[0].stats["critic/rewards/mean"]
    assert parts[0].all_loss_tokens.tolist() == [0, 18, 12, 3] * 2
