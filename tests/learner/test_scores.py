"""Teachers' scores from a group to rows: they stay with their tokens, and what is not theirs stops the group."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.teachers import Scoring, Teacher
from learner.advantages import leave_out_flat_groups
from learner.rows import BatchError, check, lay_out
from replay import messages as m
from replay.batches.build import assign, build, trained
from replay.batches.sharing import Members
from replay.channel import decode, encode
from replay.scores import problem_with_scores, stats
from replay.state.answers import kept
from tests.replay.simulated_run import config
from tests.replay.simulation.samples import make_group

STEP, VOCABULARY = 7, 10_000
TEACHERS = {
    "math": Teacher(path="big", rows={"source": "math"}),
    "old": Teacher(of="lagged", every=3),
}


def scores_of(ids: np.ndarray[Any, Any], k: int) -> dict[str, Any]:
    """What a teacher says of tokens, which follows from their ids."""
    beside = (ids[:, None] + np.arange(k)).astype(np.int32)
    top = np.log((ids[:, None] % 7 + 1) / np.full((1, k), 10.0 * max(1, k)))
    return {
        "teacher_logprobs": (-ids / VOCABULARY).astype(np.float32),
        "teacher_ids": beside.ravel(),
        "teacher_top": top.astype(np.float32).ravel(),
    }


def group_of(
    index: int, names: list[str], samples: list[int], out: list[bool], first: int, k: int, seed: int
) -> m.Group:
    """A group of such trajectories whose answer tokens are first, first + 1, ...; about a third is not in the loss."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, sum(samples))
    prompts = rng.integers(1, 4, lengths.size).astype(np.int32)
    total = int(lengths.sum())
    ids, mask = np.arange(first, first + total, dtype=np.int32), (rng.random(total) > 0.3).astype(np.uint8)
    of_answer = np.repeat(np.repeat(out, samples), lengths)
    scored = (mask != 0) & ~of_answer
    values = scores_of(ids, k)
    wide = {field: np.where(np.repeat(scored, data.size // total), data, 0) for field, data in values.items()}
    return make_group(
        lengths.tolist(),
        index=index,
        token_ids=ids,
        loss_mask=mask,
        versions=np.full(total, 5, np.int32),
        finish_reasons=["stop"] * len(samples),
        rewards=rng.random(len(samples)).astype(np.float32),
        samples=np.array(samples, np.int32),
        prompt_ids=rng.integers(0, 50, int(prompts.sum())).astype(np.int32),
        prompt_lengths=prompts,
        errors=["reward_error" if gone else "" for gone in out],
        left_out=np.array(out, np.uint8),
        teachers=["" if gone else f"{name}@{3 * (name == 'old')}" for name, gone in zip(names, out, strict=True)],
        **{field: data.astype(values[field].dtype) for field, data in wide.items()},
    )


def parts_of(groups: list[m.Group], ranks: int) -> list[m.Batch]:
    """A batch of them, over the wire."""
    whole = [kept(group) for group in groups]
    members = Members.of(whole, trained(whole, flat=True))
    placed = assign(members.prompts + members.answers, members.trained, ranks, 12)
    built = build(STEP, whole, placed, num_ranks=ranks, stats={})
    sent = [decode([bytes(frame) for frame in encode(part, "r", 1)], m.FROM_REPLAY).message for part in built]
    return [part for part in sent if isinstance(part, m.Batch)]


@settings(max_examples=40)
@given(st.data())
def test_scores_stay_with_their_tokens_through_every_split(data: st.DataObject) -> None:
    k, ranks, share = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 4)), data.draw(st.booleans())
    scoring, groups, owners = Scoring(TEACHERS, k), list[m.Group](), dict[int, str]()
    for index in range(data.draw(st.integers(1, 4))):
        out = data.draw(st.lists(st.booleans(), min_size=1, max_size=4).filter(lambda marks: not all(marks)))
        samples = [data.draw(st.integers(0 if gone else 1, 3)) for gone in out]
        names = [data.draw(st.sampled_from(list(TEACHERS))) for _ in out]
        first = 1 + sum(group.token_ids.size for group in groups)
        groups.append(group_of(index, names, samples, out, first, k, data.draw(st.integers(0, 999))))
        assert problem_with_scores(groups[-1], len(out), scoring, VOCABULARY, STEP) is None
        of_tokens = np.repeat(np.repeat(names, samples), groups[-1].lengths).tolist()
        owners |= dict(zip(groups[-1].token_ids.tolist(), of_tokens, strict=True))
    if data.draw(st.booleans()):  # replay leaves tokens out: over-age ones, or answers that were cut
        groups = [replace(group, loss_mask=group.loss_mask & (group.token_ids % 3 > 0)) for group in groups]
    wanted = np.concatenate([kept(group).token_ids[kept(group).loss_mask != 0] for group in groups])
    seen: list[int] = []
    for part in parts_of(groups, ranks):
        check(part, async_lag=2, vocab_size=VOCABULARY, scoring=scoring)
        ones = np.ones(part.all_rewards.size, np.float32)
        for row in lay_out(part, ones, ones, share, scoring=scoring):
            ids = row.targets.numpy()
            seen += ids.tolist()
            for field, values in scores_of(ids, k).items():
                found = getattr(row, field)
                assert (found is None) == (field != "teacher_logprobs" and k == 0)
                assert found is None or np.array_equal(found.numpy(), values.reshape(found.shape)), field
            assert row.teacher is not None and len(row.teacher) == len(row.lengths)
            of_token = row.teacher.repeat_interleave(row.lengths).tolist()
            assert [scoring.names[number] for number in of_token] == [owners[one] for one in ids.tolist()]
    assert sorted(seen) == sorted(wanted.tolist())


def one(**changed: Any) -> m.Group:
    """A group of two answers, of 2 tokens and of 1, the second out of the loss, with k = 2."""
    top = np.log(np.array([[0.5, 0.25], [0.0, 0.0], [0.6, 0.4]]) + np.array([[0], [1], [0]]))
    fields: dict[str, Any] = {
        "loss_mask": np.array([1, 0, 1], np.uint8),
        "teachers": ["old@3", "old@3"],
        "teacher_logprobs": np.array([-1, 0, -2], np.float32),
        "teacher_ids": np.array([1, 2, 0, 0, 3, 4], np.int32),
        "teacher_top": top.astype(np.float32).ravel(),
    }
    return make_group([2, 1], **fields | changed)


NAN = np.array([np.nan, 0, -2], np.float32)
WRONG: dict[str, dict[str, Any]] = {
    "1 teachers for 2": {"teachers": ["old@3"]},
    "has no teacher": {"teachers": ["old@3", ""]},
    "the teachers are math, old": {"teachers": ["old@3", "big@0"]},
    "a version follows": {"teachers": ["old@3", "old@x"]},
    "it stays as it is": {"teachers": ["math@0", "math@3"]},
    "multiples of 3": {"teachers": ["old@3", "old@4"]},
    "newest version is 7": {"teachers": ["old@3", "old@9"]},
    "teacher_logprobs has 2": {"teacher_logprobs": np.zeros(2, np.float32)},
    "teacher_ids has 3": {"teacher_ids": np.zeros(3, np.int32)},
    "teacher_top has 0": {"teacher_top": np.zeros(0, np.float32)},
    "not finite": {"teacher_logprobs": NAN},
    "above 0 (0.5)": {"teacher_logprobs": np.array([0.5, 0, -2], np.float32)},
    "teacher_logprobs is not 0": {"teacher_logprobs": np.array([-1, -1, -2], np.float32)},
    "teacher_top is not 0": {"teacher_top": np.full(6, -1, np.float32)},
    "of a vocabulary of 64": {"teacher_ids": np.array([1, 2, 0, 0, 3, 64], np.int32)},
    "probability 2 together": {"teacher_top": np.zeros(6, np.float32)},
}


@pytest.mark.parametrize("said", WRONG)
def test_scores_that_cannot_be_a_teachers_are_refused(said: str) -> None:
    scoring = Scoring(TEACHERS, 2)
    assert problem_with_scores(one(), 2, scoring, 64, STEP) is None
    assert said in (problem_with_scores(one(**WRONG[said]), 2, scoring, 64, STEP) or "")


def test_a_batch_has_scores_where_the_run_asks_for_them_and_nowhere_else() -> None:
    (part,) = parts_of([one()], 1)
    check(part, async_lag=9, vocab_size=64, scoring=Scoring(TEACHERS, 2))
    with pytest.raises(BatchError, match="batch 7, rank 0: has teachers, and rollout servers ask no teacher here"):
        check(part, async_lag=9, vocab_size=64)
    with pytest.raises(BatchError, match="teacher_ids has 6 entries, 3 are expected"):
        check(part, async_lag=9, vocab_size=64, scoring=Scoring(TEACHERS, 1))
    with pytest.raises(BatchError, match="has no teacher"):
        check(replace(part, teachers=["", ""]), async_lag=9, vocab_size=64, scoring=Scoring(TEACHERS, 2))


def test_shares_and_version_lags_of_teachers_are_counted_over_trajectories() -> None:
    groups = [one(), one(teachers=["math@0", "old@6"])]
    assert stats(STEP, groups, TEACHERS) == {
        "distill/share/math": 0.25,
        "distill/share/old": 0.75,
        "distill/version_lag/old": (3 + 3 + 0) / 3,
    }


def test_answers_of_zero_advantage_teach_too() -> None:
    taught = {"algorithm__distillation": "sampled", "teachers": {"big": {"path": "big"}}}
    assert [leave_out_flat_groups(made.algorithm) for made in (config(), config(**taught))] == [True, False]
