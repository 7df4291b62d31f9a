"""What a batch holds, against a slow reference; and which logprobs count when a group is checked."""

from dataclasses import replace

import numpy as np
import pytest

from replay import messages as m
from replay.batches.build import assign, build, trained
from replay.batches.sharing import Members
from replay.state.leases import Slot
from replay.state.validation import Bounds, problem_with
from tests.replay.simulated_run import config
from tests.replay.simulation.samples import make_group

STEP = 7
SIZE = 3


def group(index: int, rng: np.random.Generator, *, all_in_loss: bool) -> m.Group:
    lengths = rng.integers(1, 9, SIZE).astype(np.int32)
    total = int(lengths.sum())
    return make_group(
        lengths.tolist(),
        index=index,
        prompt_ids=rng.integers(0, 50, int(rng.integers(1, 5))).astype(np.int32),
        token_ids=rng.integers(0, 50, total).astype(np.int32),
        loss_mask=np.ones(total, np.uint8) if all_in_loss else rng.integers(0, 2, total).astype(np.uint8),
        logprobs=-rng.random(total).astype(np.float32),
        versions=rng.integers(2, STEP, total).astype(np.int32),
        rewards=rng.random(SIZE).astype(np.float32),
    )


def built(groups: list[m.Group], ranks: int = 1) -> list[m.Batch]:
    members = Members.of(groups, trained(groups, flat=False))
    placed = assign(members.prompts + members.answers, members.trained, ranks, 40)
    return build(STEP, groups, placed, num_ranks=ranks, stats={})


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("seed", range(6))
def test_a_batch_holds_every_trajectory_as_it_came(seed: int, ranks: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [group(i, rng, all_in_loss=bool(rng.random() < 0.5)) for i in range(5)]
    parts = built(groups, ranks)
    seen = []
    for part in parts:
        answer = tokens = 0
        for trajectory, length, prompt in zip(part.trajectory, part.lengths, part.prompt_lengths, strict=True):
            source, k = groups[trajectory // SIZE], trajectory % SIZE
            start = int(source.lengths[:k].sum())
            wanted = slice(start, start + int(source.lengths[k]))
            here = slice(answer, answer := answer + int(length))
            for name in ("loss_mask", "logprobs", "versions"):
                assert getattr(part, name)[here].tolist() == getattr(source, name)[wanted].tolist()
            ids = part.token_ids[tokens : (tokens := tokens + int(prompt + length))]
            assert ids.tolist() == [*source.prompt_ids, *source.token_ids[wanted]]
            assert int(part.all_loss_tokens[trajectory]) == int(source.loss_mask[wanted].sum())
            seen.append(int(trajectory))
        assert (answer, tokens) == (part.versions.size, part.token_ids.size)
    assert sorted(seen) == list(range(5 * SIZE))


@pytest.mark.parametrize("seed", range(6))
def test_lag_is_counted_over_the_tokens_in_the_loss(seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = [group(i, rng, all_in_loss=i % 2 == 0) for i in range(4)]
    (part,) = built(groups)
    pairs = [pair for g in groups for pair in zip(g.versions.tolist(), g.loss_mask.tolist(), strict=True)]
    lags = [STEP - 1 - version for version, in_loss in pairs if in_loss]
    assert part.lag_histogram == {str(lag): lags.count(lag) for lag in sorted(set(lags))}
    assert list(part.lag_histogram) == sorted(part.lag_histogram, key=int)
    assert part.total_loss_tokens == len(lags)
    assert part.stats["training/off_policy/trajectory_staleness/mean"] == pytest.approx(np.mean(lags), rel=1e-12)
    assert part.stats["training/off_policy/trajectory_staleness/max"] == max(lags)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_only_sampled_tokens_need_a_logprob(value: float) -> None:
    checked = config(rollout__group_size=SIZE)
    one = group(0, np.random.default_rng(1), all_in_loss=True)
    slot = Slot((0, 0), {}, 0, attempt=1)
    bounds = Bounds(STEP, 50)
    assert problem_with(one, slot, checked, bounds) is None
    one.logprobs[2] = value
    assert "logprob" in (problem_with(one, slot, checked, bounds) or "")
    one.loss_mask[2] = 0
    assert problem_with(one, slot, checked, bounds) is None
    one.loss_mask[:] = 0
    assert problem_with(one, slot, checked, bounds) is None


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_each_rank_has_the_pictures_of_its_own_samples_and_no_others(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    groups = [
        replace(
            group(i, rng, all_in_loss=True),
            pictures=[f"{i}{k}:2:" for k in range(i)],
            picture_bytes=np.full(2 * i, i, np.uint8),
        )
        for i in range(3)
    ]
    for part in built(groups, ranks):
        here = [g for i, g in enumerate(groups) if (part.trajectory // SIZE == i).any()]
        assert part.pictures == [picture for g in here for picture in g.pictures]
        assert part.picture_bytes.tolist() == [byte for g in here for byte in g.picture_bytes]
        counts = [len(g.pictures) if g in here else 0 for g in groups]
        assert part.picture_counts.tolist() == (counts if any(counts) else [])


def test_what_rewards_say_is_averaged_over_those_that_say_it_and_counts_of_episodes_over_all_groups() -> None:
    said: list[dict[str, float]] = [{"style": 1.0}, {"style": 4.0, "episode/late": 3.0}, {}]
    groups = [replace(group(i, np.random.default_rng(i), all_in_loss=True), reward_metrics=said[i]) for i in range(3)]
    (part,) = built(groups)
    assert part.stats["reward/style"] == 2.5 and part.stats["episode/late"] == 1.0
    assert not {"style", "episode/style", "reward/late"} & part.stats.keys()
