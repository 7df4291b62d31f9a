"""Prompts that answers share: when it pays, against all choices; and assignments that keep groups together."""

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay import messages as m
from replay.batches import build as batches
from replay.batches.sharing import COPIES_PER_TOKEN, SHORTEST, Members, Wanted, assign, assign_minibatches, sharers
from tests.replay.simulated_run import group_message, lease, sent, service
from tests.replay.simulation.samples import make_group


def cost(wanted: Wanted, prompt: int, answers: list[int]) -> Fraction:
    """Tokens of answers to one prompt in one microbatch, and their copies, written out."""
    shares = sharers(wanted, prompt, np.array(answers, np.int64)).tolist()
    shared = [answer for answer, is_shared in zip(answers, shares, strict=True) if is_shared]
    total = Fraction(sum(prompt + answer for answer, is_shared in zip(answers, shares, strict=True) if not is_shared))
    if shared:
        assert len(shared) > 1
        total += prompt + sum(shared) + Fraction(sum(prompt + answer for answer in shared), COPIES_PER_TOKEN)
    return total


@given(st.integers(SHORTEST, 200), st.lists(st.integers(1, 2000), min_size=1, max_size=6))
def test_auto_is_the_cheapest_of_all_choices(prompt: int, answers: list[int]) -> None:
    apart = sum(prompt + answer for answer in answers)
    copied = [Fraction(prompt + answer, COPIES_PER_TOKEN) for answer in answers]
    choices = itertools.chain.from_iterable(itertools.combinations(range(len(answers)), k) for k in range(2, 7))
    costs = [apart - (len(chosen) - 1) * prompt + sum(copied[i] for i in chosen) for chosen in choices]
    assert cost("auto", prompt, answers) == min([apart, *costs])


@pytest.mark.parametrize(("size", "times"), [(2, 3), (4, 5), (8, 6), (64, 7)])
def test_from_where_on_it_pays(size: int, times: int) -> None:
    """The numbers that docs/algorithms.md gives: answers below `times` times the prompt's tokens."""
    longest = max(a for a in range(1, 64 * 8) if sharers("auto", 64, np.full(size, a)).any())
    assert longest == (7 * 64 * size - 8 * 64 - 1) // size and round(longest / 64) == times
    assert not sharers("auto", SHORTEST - 1, np.full(size, 1)).any()
    assert sharers(True, 1, np.full(size, 999)).all() and not sharers(False, 999, np.full(size, 1)).any()


GROUP = st.tuples(st.integers(1, 300), st.lists(st.integers(1, 900), min_size=4, max_size=4), st.booleans())


@settings(max_examples=60)
@given(
    groups=st.lists(GROUP, min_size=1, max_size=9),
    ranks=st.integers(1, 4),
    max_tokens=st.integers(1200, 4000),
    wanted=st.sampled_from([False, "auto", True]),
)
def test_every_trajectory_has_one_place_and_no_microbatch_costs_too_much(
    groups: list[tuple[int, list[int], bool]], ranks: int, max_tokens: int, wanted: Wanted
) -> None:
    members = Members(
        prompts=np.repeat([prompt for prompt, _, _ in groups], 4),
        answers=np.concatenate([answers for _, answers, _ in groups]),
        groups=np.repeat(np.arange(len(groups)), 4),
        trained=np.repeat([trained for _, _, trained in groups], 4),
    )
    made = assign(members, wanted, ranks, max_tokens)
    apart = batches.assign(members.prompts + members.answers, members.trained, ranks, max_tokens)
    assert made.rank.max() < ranks and made.microbatch.max() < made.num_microbatches
    rest = np.bincount(made.rank[~members.trained], minlength=ranks)
    assert rest.max() - rest.min() <= 1 and not made.microbatch[~members.trained].any()
    costs = loads(made, members, ranks, wanted)
    assert costs.max() <= max_tokens
    if wanted == "auto":
        assert costs.max(1).sum() <= loads(apart, members, ranks, False).max(1).sum(), "slower than without sharing"
    if wanted is False:
        assert np.array_equal(made.rank, apart.rank) and np.array_equal(made.microbatch, apart.microbatch)


@settings(max_examples=40)
@given(
    groups=st.lists(GROUP, min_size=1, max_size=9),
    ranks=st.integers(1, 3),
    wanted=st.sampled_from([False, "auto", True]),
    data=st.data(),
)
def test_minibatches_are_assigned_like_batches_of_their_own(
    groups: list[tuple[int, list[int], bool]], ranks: int, wanted: Wanted, data: st.DataObject
) -> None:
    number = data.draw(st.integers(1, len(groups)))
    made_of = [make_group(answers, prompt_ids=np.zeros(prompt, np.int32)) for prompt, answers, _ in groups]
    trained = np.repeat([is_trained for _, _, is_trained in groups], 4)
    place = {"num_ranks": ranks, "max_tokens": 1200}
    made, minibatches = assign_minibatches(made_of, trained, wanted, **place, number=number)
    assert sum(count for count, _ in minibatches) == len(groups) and len(minibatches) == number
    assert max(count for count, _ in minibatches) - min(count for count, _ in minibatches) <= 1
    assert made.num_microbatches == sum(count for _, count in minibatches)
    group = microbatch = 0
    for count, microbatches in minibatches:
        here = slice(group * 4, (group + count) * 4)
        alone = assign(Members.of(made_of[group : group + count], trained[here]), wanted, ranks, 1200)
        assert np.array_equal(made.rank[here], alone.rank) and microbatches == alone.num_microbatches
        assert np.array_equal(made.microbatch[here], alone.microbatch + microbatch)
        group, microbatch = group + count, microbatch + microbatches


def loads(made: batches.Assignment, members: Members, ranks: int, wanted: Wanted) -> np.ndarray:
    """[microbatches, ranks] cost of each."""
    found = np.zeros((made.num_microbatches, ranks))
    keys = np.stack([made.microbatch, made.rank, members.groups])[:, members.trained]
    for microbatch, rank, group in {tuple(key) for key in keys.T.tolist()}:
        here = (made.microbatch == microbatch) & (made.rank == rank) & (members.groups == group) & members.trained
        answers = members.answers[here].tolist()
        found[microbatch, rank] += float(cost(wanted, int(members.prompts[here][0]), answers))
    return found


@pytest.mark.parametrize(("prompt", "faster"), [(256, 1.05), (512, 1.15), (2048, 1.75)])
def test_ranks_stay_alike_and_steps_get_shorter(prompt: int, faster: float) -> None:
    """The skewed batch of tests/replay/test_batch_build.py on 8 ranks: lognormal answers, half of the groups flat."""
    random = np.random.default_rng(0)
    members = Members(
        prompts=np.full(512, prompt),
        answers=np.minimum(random.lognormal(6.5, 0.8, 512).astype(np.int64) + 1, 4096),
        groups=np.repeat(np.arange(64), 8),
        trained=np.repeat(random.random(64) < 0.5, 8),
    )
    apart, kept = (assign(members, wanted, 8, 16_384) for wanted in (False, "auto"))
    before, after = loads(apart, members, 8, False), loads(kept, members, 8, "auto")
    assert after.max(1).sum() / after.mean(1).sum() <= 1.06, "the slowest rank over the mean"
    assert before.max(1).sum() / after.max(1).sum() >= faster


@pytest.mark.parametrize(("wanted", "together"), [(False, 1), ("auto", 2), (True, 2)])
def test_replay_keeps_answers_together_as_configured(wanted: Wanted, together: int) -> None:
    """Four groups of two answers for two ranks: a prompt of 64 tokens is most of a trajectory."""
    made = service(ranks=2, learner__share_prefixes=wanted, learner__max_tokens_per_microbatch=2000)
    for given_lease in lease(made, capacity=4):
        made.handle("a", replace(group_message(given_lease, [0] * 5), prompt_ids=np.arange(64, dtype=np.int32)), 1.0)
    for rank, peer in enumerate(("l", "l1")):
        made.handle(peer, m.Take(step=1, rank=rank), 2.0)
    parts = [part for peer in ("l", "l1") for part in sent(made, peer, m.Batch)]
    places = [(part.rank, mb, part.all_groups[i]) for part in parts
              for i, mb in zip(part.trajectory, part.microbatch, strict=True)]  # fmt: skip
    assert [part.rank for part in parts] == [0, 1] and len(places) == 8
    assert {places.count(place) for place in places} == {together}
