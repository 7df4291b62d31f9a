"""Microbatches: alignment to the predicted token, padding, dummies, and contradictions that are refused."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import batch_of, random_step
from reference import Recorded

from learner.packing import Packed, PackingError, active_trajectories, check, pack
from replay.messages import Batch

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


def packed(
    batch: Batch,
    advantages: list[float],
    active: list[bool] | None = None,
    *,
    async_lag: int = 2,
    unpadded: bool = False,
) -> Packed:
    values = np.array(advantages, np.float32)
    marks = np.array(active) if active is not None else np.ones(len(values), np.bool_)
    check(batch, async_lag=async_lag, vocab_size=64)
    return pack(batch, values, marks, unpadded=unpadded)


def test_columns_speak_of_the_predicted_token():
    (microbatch,) = packed(batch_of(ONE, STEP), [1.5, -0.5]).microbatches
    assert microbatch.input_ids.tolist() == [[7, 8, 9, 5, 2], [6, 4, 0, 0, 0]]
    assert microbatch.targets.tolist() == [[8, 9, 5, 2], [4, 0, 0, 0]]
    assert microbatch.mask.tolist() == [[0, 1, 0, 1], [1, 0, 0, 0]]
    assert microbatch.behaviour_logprobs.tolist() == [[0, -0.5, -9.0, -0.25], [-1.0, 0, 0, 0]]
    assert microbatch.advantages.tolist() == [[0, 1.5, 1.5, 1.5], [-0.5, 0, 0, 0]]
    assert microbatch.lags.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert microbatch.input_ids.dtype == torch.int64
    assert {t.dtype for t in (microbatch.mask, microbatch.lags, microbatch.advantages)} == {torch.float32}


def test_without_padding_there_is_one_row_and_a_column_for_each_token_in_the_loss():
    (microbatch,) = packed(batch_of(ONE, STEP), [1.5, -0.5], unpadded=True).microbatches
    assert microbatch.input_ids.tolist() == [[7, 8, 9, 5, 2, 6, 4]]
    row = microbatch.row
    assert row is not None and row.longest == 5
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert row.starts.tolist() == [0, 5, 7] and row.starts.dtype == torch.int32
    assert row.kept.tolist() == [1, 3, 5]
    assert microbatch.targets.tolist() == [[9, 2, 4]]
    assert microbatch.mask.tolist() == [[1, 1, 1]]
    assert microbatch.behaviour_logprobs.tolist() == [[-0.5, -0.25, -1.0]]
    assert microbatch.advantages.tolist() == [[1.5, 1.5, -0.5]]
    assert microbatch.lags.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(("unpadded", "weights"), [(False, [[0]]), (True, [[]])])
def test_a_microbatch_without_trajectories_is_a_dummy_of_weight_zero(unpadded, weights):
    batch = batch_of(ONE, STEP, num_microbatches=3)
    result = packed(batch, [1.5, -0.5], [False, True], unpadded=unpadded)
    assert [m.input_ids.tolist() for m in result.microbatches] == [[[0, 0]], [[6, 4]], [[0, 0]]]
    assert [m.mask.tolist() for m in result.microbatches] == [weights, [[1]], weights]
    assert [m.row.starts.tolist() for m in result.microbatches if m.row] == [[0, 2]] * (3 * unpadded)
    assert result.global_tokens == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 4))
def test_both_layouts_say_the_same_of_the_same_tokens(seed, ranks, microbatches):
    trajectories = random_step(9, seed=seed)
    values = [float(i) for i in range(len(trajectories))]
    for rank in range(ranks):
        batch = batch_of(trajectories, 9, rank=rank, world_size=ranks, num_microbatches=microbatches)
        both = [packed(batch, values, unpadded=unpadded).microbatches for unpadded in (False, True)]
        for padded, unpadded in zip(*both, strict=True):
            measured = [
                torch.stack([m.targets, m.behaviour_logprobs, m.advantages, m.lags])[:, m.mask > 0]
                for m in (padded, unpadded)
            ]
            assert torch.equal(*measured)


def test_a_trajectory_without_tokens_in_the_loss_is_left_out():
    masked = [dataclasses.replace(ONE[0], loss_mask=[0, 0, 0]), ONE[1]]
    result = packed(batch_of(masked, STEP), [1.5, -0.5])
    assert result.microbatches[0].input_ids.tolist() == [[6, 4]]


def test_zero_advantages_are_dropped_only_when_asked():
    values = np.array([0.0, -1.0, 0.0], np.float32)
    assert active_trajectories(values, drop_zero_advantage=True).tolist() == [False, True, False]
    assert active_trajectories(values, drop_zero_advantage=False).tolist() == [True, True, True]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3), st.integers(1, 4))
def test_ranks_and_microbatches_share_out_every_active_token_once(seed, ranks, microbatches):
    trajectories = random_step(9, seed=seed)
    active = [t.group != 0 for t in trajectories]
    tokens, logprobs = 0, 0.0
    for rank in range(ranks):
        batch = batch_of(trajectories, 9, rank=rank, world_size=ranks, num_microbatches=microbatches)
        result = packed(batch, [1.0] * len(trajectories), active)
        assert len(result.microbatches) == microbatches
        for microbatch in result.microbatches:
            tokens += int(microbatch.mask.sum())
            logprobs += float((microbatch.behaviour_logprobs * microbatch.mask).sum())
    kept = [t for t in trajectories if t.group != 0]
    assert tokens == result.global_tokens == sum(sum(t.loss_mask) for t in kept)
    expected = sum(lp for t in kept for lp, m in zip(t.logprobs, t.loss_mask, strict=True) if m)
    assert logprobs == pytest.approx(expected, rel=1e-5)


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
    ],
)
def test_contradictions_are_refused(changes, message):
    batch = dataclasses.replace(batch_of(ONE, STEP), **changes)
    with pytest.raises(PackingError, match=message):
        packed(batch, [1.0, -1.0])


def test_a_token_out_of_the_loss_may_be_over_age():
    batch = dataclasses.replace(batch_of(ONE, STEP), versions=np.array([3, 0, 4, 4], np.int32))
    assert packed(batch, [1.0, -1.0]).microbatches[0].lags.tolist()[0] == [0, 1, 0, 0]
