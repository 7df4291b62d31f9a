"""Rows: alignment to the predicted token, dummies, filled-up shapes, and contradictions that are refused."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from configs import Config
from learner.advantages import build_advantage
from learner.learner import Learner
from learner.rows import BatchError, Row, check, lay_out
from replay.messages import Batch
from slipstream.runtime.variants import VariantFails
from tests.learner.recorded import batch_of
from tests.learner.reference import Recorded
from tests.learner.tiny_models import make_config

ONE = [
    Recorded(
        prompt_ids=[7, 8],
        response_ids=[9, 5, 2],
        loss_mask=[1, 0, 1],
        logprobs=[-0.5, -9.0, -0.25],
        versions=[3, 3, 4],
        reward=1.0,
        group=0,
    ),
    Recorded(prompt_ids=[6], response_ids=[4], loss_mask=[1], logprobs=[-1.0], versions=[4], reward=0.0, group=0),
]
STEP = 5


def laid_out(batch: Batch, advantages: list[float], weights: list[float] | None = None, **options: Any) -> list[Row]:
    check(batch, async_lag=2, vocab_size=64)
    values = np.array(advantages, np.float32)
    return lay_out(batch, values, np.ones_like(values) if weights is None else np.array(weights, np.float32), **options)


def test_every_element_speaks_of_a_token_in_the_loss() -> None:
    (row,) = laid_out(batch_of(ONE, STEP), [1.5, -0.5], [0.25, 0.5])
    assert row.input_ids.tolist() == [[7, 8, 9, 5, 2, 6, 4]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert row.starts.tolist() == [0, 5, 7] and row.starts.dtype == torch.int32 and row.longest == 5
    assert row.kept.tolist() == [1, 3, 5]
    assert row.targets.tolist() == [9, 2, 4]
    assert row.behaviour_logprobs.tolist() == [-0.5, -0.25, -1.0]
    assert row.advantages.tolist() == [1.5, 1.5, -0.5]
    assert row.weights.tolist() == [0.25, 0.25, 0.5]
    assert row.lags.tolist() == [1, 0, 0]
    assert row.lengths.tolist() == [2, 1] and row.groups.tolist() == [0, 0]
    assert row.fresh.tolist() == [False, True]


def test_a_row_without_trajectories_has_two_tokens_and_none_in_the_loss() -> None:
    rows = laid_out(batch_of(ONE, STEP, num_microbatches=3), [1.5, -0.5], [0.0, 1.0])
    assert [row.input_ids.tolist() for row in rows] == [[[0, 0]], [[6, 4]], [[0, 0]]]
    assert [row.targets.tolist() for row in rows] == [[], [4], []]
    assert [row.lengths.tolist() for row in rows] == [[], [1], []]


def test_a_trajectory_without_tokens_in_the_loss_is_left_out() -> None:
    masked = [dataclasses.replace(ONE[0], loss_mask=[0, 0, 0]), ONE[1]]
    assert laid_out(batch_of(masked, STEP), [1.5, -0.5])[0].input_ids.tolist() == [[6, 4]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": np.array([1, 3, 4, 4], np.int32)}, "sampled by version 1 has lag 3, allowed are 0 to 2"),
        ({"versions": np.array([3, 3, 5, 4], np.int32)}, "sampled by version 5 has lag -1"),
        ({"logprobs": np.array([-0.5, -9, np.nan, -1], np.float32)}, "answer token 2 has behaviour logprob nan"),
        ({"all_rewards": np.array([1, np.inf], np.float32)}, "reward of trajectory 1 is inf"),
        ({"logprobs": np.array([-0.5], np.float32)}, "logprobs has 1 entries, not 4"),
        ({"microbatch": np.array([0, 1], np.int32)}, r"microbatch\[1\] is 1, not below 1"),
        ({"trajectory": np.array([0, -1], np.int32)}, r"trajectory\[1\] is -1"),
        ({"all_loss_tokens": np.array([3, 1], np.int32)}, "trajectory 0 has 2 tokens in the loss, .* says 3"),
        ({"prompt_lengths": np.array([3, 0], np.int32)}, "trajectory 1 has a prompt of 0 tokens"),
        ({"all_samples": np.array([1], np.int32)}, "all_samples has 1 entries, not 2"),
        ({"minibatches": [[1, 2]]}, r"mini-batches \[\[1, 2\]\] of groups and microbatches do not divide \[1, 1\]"),
        ({"minibatches": [[1, 1], [0, 0]]}, "do not divide"),
        ({"all_groups": np.array([1, 0], np.int32)}, "trajectory 1 is of an earlier group than the one before"),
        ({"picture_counts": np.array([0, 0], np.int32)}, "picture_counts has 2 entries, not 1"),
        ({"picture_counts": np.array([1], np.int32)}, "pictures has 0 entries, not 1"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    batch = dataclasses.replace(batch_of(ONE, STEP), **changes)
    with pytest.raises(BatchError, match=message):
        laid_out(batch, [1.0, -1.0])


def test_a_trajectory_in_the_microbatch_of_another_minibatch_is_refused() -> None:
    batch = batch_of([*ONE[:1], dataclasses.replace(ONE[1], group=1)], STEP, minibatches=2)
    laid_out(batch, [1.0, -1.0])
    with pytest.raises(BatchError, match="trajectory 1 is in a microbatch of another mini-batch"):
        laid_out(dataclasses.replace(batch, microbatch=np.array([0, 0], np.int32)), [1.0, -1.0])


def test_a_token_out_of_the_loss_may_be_over_age() -> None:
    batch = dataclasses.replace(batch_of(ONE, STEP), versions=np.array([3, 0, 4, 4], np.int32))
    (row,) = laid_out(batch, [1.0, -1.0])
    assert row.lags.tolist() == [1, 0, 0]
    behind = dataclasses.replace(batch, versions=np.array([4, 0, 4, 4], np.int32))
    assert laid_out(behind, [1.0, -1.0])[0].fresh.tolist() == [False, True], "keys and values of version 0 are its own"


def test_groups_keep_the_bound_that_they_were_admitted_under() -> None:
    batch = batch_of(ONE, STEP)
    old = dataclasses.replace(batch, versions=np.full_like(batch.versions, STEP - 1 - 2), async_lag=2)
    check(old, async_lag=0, vocab_size=64)
    with pytest.raises(BatchError, match="has lag 2, allowed are 0 to 1"):
        check(dataclasses.replace(old, async_lag=1), async_lag=0, vocab_size=64)


def checking(config: Config) -> Any:
    trainer = SimpleNamespace(experts=None, advantage=build_advantage(config.algorithm))
    return SimpleNamespace(config=config, policy=SimpleNamespace(vocab_size=64), trainer=trainer)


def test_an_advantage_of_the_user_that_fails_is_no_fault_of_the_batch(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def own(inputs):\n    return inputs.rewards[:1]\n")
    config = make_config(tmp_path, replay={"async_lag": 1}, algorithm={"advantage": f"{tmp_path}/own.py:own"})
    with pytest.raises(VariantFails, match="one finite number for each"):
        Learner.check(checking(config), batch_of(ONE, STEP))


def test_rewards_that_the_advantage_does_not_take_are_refused_before_the_step() -> None:
    """Later every start of the learner would take the batch again, and break off again."""
    config = make_config(Path("unused"), replay={"async_lag": 1}, algorithm={"advantage": "maxrl"})
    learner = checking(config)
    Learner.check(learner, batch_of(ONE, STEP))
    punished = [ONE[0], dataclasses.replace(ONE[1], reward=-1.0)]
    said = r"batch 5: reward of trajectory 1 is -1; .*'maxrl'.* takes rewards >= 0 .*REWARD-08"
    with pytest.raises(BatchError, match=said):
        Learner.check(learner, batch_of(punished, STEP))
