"""Trajectories of several samples: from group to rows they share a reward, count once, and lose no token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs import Config
from configs.algorithm import Algorithm
from learner.advantages import ADVANTAGES, build_advantage, leave_out_flat_groups
from learner.losses import LOSSES
from learner.objective import Objective
from learner.rows import check
from learner.trainer import prepare
from replay import messages as m
from replay.batches import build as batches
from replay.batches import sharing
from replay.batches.overlong import shape
from replay.state.answers import kept
from replay.state.leases import Slot
from replay.state.validation import Bounds, problem_with
from tests.learner.tiny_models import make_config
from tests.replay.simulation.samples import make_group

STEP, SIZE, LIMIT = 4, 3, 40


def config(**algorithm: Any) -> Config:
    sizes = {"data": {"max_prompt_tokens": 8}, "rollout": {"group_size": SIZE, "max_new_tokens": 8}}
    return make_config(Path("none"), algorithm=algorithm, **sizes)


def episodes(rng: np.random.Generator, index: int) -> m.Group:
    """A group of SIZE episodes of 1 to 3 samples, some of them with environment tokens and some with nothing else."""
    samples = rng.integers(1, 4, SIZE).astype(np.int32)
    count = int(samples.sum())
    lengths, prompts = rng.integers(1, 8, count).astype(np.int32), rng.integers(1, 8, count).astype(np.int32)
    total = int(lengths.sum())
    return make_group(
        lengths.tolist(),
        index=index,
        samples=samples,
        prompt_lengths=prompts,
        prompt_ids=rng.integers(0, 64, int(prompts.sum())).astype(np.int32),
        token_ids=rng.integers(0, 64, total).astype(np.int32),
        loss_mask=rng.integers(0, 2, total).astype(np.uint8),
        logprobs=-rng.random(total).astype(np.float32),
        versions=rng.integers(2, STEP, total).astype(np.int32),
        rewards=rng.permutation(np.array([0.0, 1.0, 3.0], np.float32)),
        finish_reasons=["stop"] * SIZE,
    )


def batch_of(groups: list[m.Group], ranks: int) -> list[m.Batch]:
    members = sharing.Members.of(groups, batches.trained(groups, flat=False))
    return batches.build(STEP, groups, sharing.assign(members, "auto", ranks, LIMIT), num_ranks=ranks, stats={})


def pieces(group: m.Group) -> list[tuple[int, list[int], list[int], list[float], list[int]]]:
    """(trajectory, prompt, answer, logprobs, mask) of every sample, written out."""
    found, prompt, answer = [], 0, 0
    owners = np.repeat(np.arange(SIZE), group.samples)
    for owner, size, length in zip(owners, group.prompt_lengths, group.lengths, strict=True):
        here, there = slice(prompt, prompt := prompt + int(size)), slice(answer, answer := answer + int(length))
        mask, logprobs = group.loss_mask[there].tolist(), group.logprobs[there].tolist()
        found.append((int(owner), group.prompt_ids[here].tolist(), group.token_ids[there].tolist(), logprobs, mask))
    return found


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 3), st.sampled_from(["token", "sequence", "constant"]))
def test_samples_of_an_episode_share_its_reward_and_no_token_is_lost(seed: int, ranks: int, how: str) -> None:
    rng = np.random.default_rng(seed)
    groups = [episodes(rng, index) for index in range(4)]
    settled = config(aggregation=how, advantage="dr_grpo")
    trained: list[tuple[float, float, float]] = []
    for batch in batch_of(groups, ranks):
        check(batch, async_lag=1, vocab_size=64)
        work = prepare(batch, build_advantage(settled.algorithm), settled)
        for row in work.rows:
            values = (row.behaviour_logprobs, row.advantages, row.weights)
            trained += list(zip(*(value.tolist() for value in values), strict=True))
    loss_tokens = [
        sum(sum(mask) for owner, _, _, _, mask in pieces(group) if owner == number)
        for group in groups
        for number in range(SIZE)
    ]
    advantages = [float(r - group.rewards.mean()) for group in groups for r in group.rewards]
    counted = [n if a != 0 else 0 for n, a in zip(loss_tokens, advantages, strict=True)]
    live = max(1, sum(n > 0 for n in counted))
    weight = {
        "token": lambda n: 1 / max(1, sum(counted)),
        "sequence": lambda n: 1 / (live * n),
        "constant": lambda n: 1 / (live * 8),
    }[how]
    expected = []
    for at, group in enumerate(groups):
        for owner, _, _, logprobs, mask in pieces(group):
            of = at * SIZE + owner
            if counted[of]:
                expected += [
                    (lp, advantages[of], weight(counted[of])) for lp, is_in in zip(logprobs, mask, strict=True) if is_in
                ]
    assert np.allclose(sorted(trained), sorted(expected), rtol=1e-5) if expected else not trained


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": np.array([1, 1], np.int32)}, "2 trajectories, 3 rewards; a group has 3"),
        ({"samples": np.array([1, 1, 0], np.int32)}, "do not add up"),
        ({"samples": np.array([9, 9, 9], np.int32)}, "do not add up"),
        ({"prompt_lengths": np.array([1], np.int32)}, "1 prompts of 1 tokens"),
        ({"lengths": np.zeros(0, np.int32)}, "do not add up to 0 lengths"),
    ],
)
def test_samples_that_contradict_are_refused_by_replay(changes: dict[str, Any], message: str) -> None:
    group = replace(episodes(np.random.default_rng(2), 0), **changes)
    slot = Slot((0, 0), {}, 0, attempt=1)
    said = problem_with(group, slot, config(), Bounds(STEP, 64))
    assert said is not None and message in said


def test_an_episode_has_no_more_samples_than_turns() -> None:
    settled, slot = config(), Slot((0, 0), {}, 0, attempt=1)
    for most in (settled.environment.max_turns, settled.environment.max_turns + 1):
        samples = np.array([1, most, 1], np.int32)
        group = make_group([1] * (most + 2), samples=samples, rewards=np.ones(3, np.float32))
        problem = problem_with(replace(group, finish_reasons=["stop"] * SIZE), slot, settled, Bounds(STEP, 64))
        assert (problem is None) == (most == 16), problem
    assert problem is not None and "17 samples of a trajectory (environment.max_turns 16)" in problem


def test_a_sample_is_bounded_as_prompt_and_answer_together() -> None:
    """The prompt of a context that was compacted may be longer than a prompt of the data."""
    group, slot = episodes(np.random.default_rng(3), 0), Slot((0, 0), {}, 0, attempt=1)
    assert problem_with(group, slot, config(), Bounds(STEP, 64)) is None
    grown = group.prompt_lengths.copy()
    grown[0] += (more := 17 - int(grown[0]))
    group = replace(group, prompt_lengths=grown, prompt_ids=np.concatenate((np.ones(more, np.int32), group.prompt_ids)))
    assert "a sample of" in str(problem_with(group, slot, config(), Bounds(STEP, 64)))


def test_an_overlong_episode_pays_for_its_longest_sample() -> None:
    group = make_group([2, 8, 4, 1], samples=np.array([2, 1, 1], np.int32), rewards=np.ones(3, np.float32))
    ends = replace(group, finish_reasons=["length", "stop", "stop"])
    algorithm = config(overlong_buffer=4, overlong_filter=True).algorithm
    (shaped,), _ = shape([ends], algorithm, 8)
    assert shaped.rewards.tolist() == [0.0, 1.0, 1.0]
    assert shaped.loss_mask.tolist() == [0] * 10 + [1] * 5


def without(group: m.Group, gone: int) -> m.Group:
    """The group as if one of its episodes had never been, written out piece by piece."""
    left = [piece for piece in pieces(group) if piece[0] != gone]
    versions = np.split(group.versions, np.cumsum(group.lengths)[:-1])
    owners = np.repeat(np.arange(SIZE), group.samples)
    own = [part for part, owner in zip(versions, owners, strict=True) if owner != gone]
    return replace(
        group,
        samples=np.delete(group.samples, gone),
        rewards=np.delete(group.rewards, gone),
        finish_reasons=group.finish_reasons[1:],
        lengths=np.array([len(answer) for _, _, answer, _, _ in left], np.int32),
        prompt_lengths=np.array([len(prompt) for _, prompt, _, _, _ in left], np.int32),
        prompt_ids=np.array([one for _, prompt, _, _, _ in left for one in prompt], np.int32),
        token_ids=np.array([one for _, _, answer, _, _ in left for one in answer], np.int32),
        logprobs=np.array([one for _, _, _, logprobs, _ in left for one in logprobs], np.float32),
        loss_mask=np.array([one for _, _, _, _, mask in left for one in mask], np.uint8),
        versions=np.concatenate(own),
    )


def gradients_of(groups: list[m.Group], ranks: int, settled: Config) -> list[tuple[int, float, float, float]]:
    """(token, behaviour logprob, advantage, gradient) of every token in the loss, over all ranks."""
    objective, found = Objective(settled.algorithm), []
    trained = batches.trained(groups, flat=not leave_out_flat_groups(settled.algorithm))
    assignment = sharing.assign(sharing.Members.of(groups, trained), "auto", ranks, LIMIT)
    for batch in batches.build(STEP, groups, assignment, num_ranks=ranks, stats={}):
        check(batch, async_lag=1, vocab_size=64)
        for row in prepare(batch, build_advantage(settled.algorithm), settled).rows:
            new = (row.behaviour_logprobs + 0.3 * torch.sin(row.targets.float())).requires_grad_()
            loss, _ = objective(row, new, torch.zeros_like(new))
            loss.backward()
            assert new.grad is not None
            values = (row.targets, row.behaviour_logprobs, row.advantages, new.grad)
            found += list(zip(*(value.tolist() for value in values), strict=True))
    return sorted(found)


@pytest.mark.parametrize("loss", LOSSES.built_in)
@pytest.mark.parametrize("advantage", ADVANTAGES.built_in)
@settings(max_examples=5)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(0, SIZE - 1))
def test_a_group_with_a_masked_answer_has_the_gradient_of_the_group_without_it(
    advantage: str, loss: str, seed: int, ranks: int, gone: int
) -> None:
    """On fewer ranks than answers, and on more."""
    rng = np.random.default_rng(seed)
    groups = [episodes(rng, index) for index in range(2)]
    marks = np.eye(SIZE, dtype=np.uint8)[gone]
    masked = replace(groups[0], left_out=marks, errors=["environment_error" if mark else "" for mark in marks])
    algorithm = Algorithm(advantage=advantage, loss=loss)  # at any lag, which the whole configuration refuses
    settled = config().model_copy(update={"algorithm": algorithm})
    found = gradients_of([kept(masked), groups[1]], ranks, settled)
    expected = gradients_of([without(groups[0], gone), groups[1]], ranks, settled)
    assert found == expected
