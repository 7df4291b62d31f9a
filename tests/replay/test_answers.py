"""Answers that failed: left out of their group, counted by reason, and past their share the end of a run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st

from replay import messages as m
from replay.state.answers import WINDOW, ErrorRate, kept
from tests.replay.simulated_run import lease, sent, service
from tests.replay.simulation.samples import make_group

SIZE = 4
GROUP = {"rollout__group_size": SIZE, "rollout__groups_per_step": 2}


def failing(given, *which, code="reward_error", left_out=True, **fields):
    """The group of a lease, of which these answers failed; answer i has i + 1 tokens."""
    lengths = np.arange(1, SIZE + 1, dtype=np.int32)
    errors = [code if i in which else "" for i in range(SIZE)]
    marks = np.array([left_out and i in which for i in range(SIZE)], np.uint8)
    ids = {"pass_": given.pass_, "index": given.index, "attempt": given.attempt}
    detail = "KeyError: 'answer'"
    return make_group(lengths.tolist(), **ids, errors=errors, left_out=marks, error_detail=detail, **fields)


def test_a_group_trains_from_its_valid_answers_and_the_others_are_counted():
    made = service(**GROUP)
    made.handle("l", m.Take(step=1, rank=0), 0.0)
    for number, given in enumerate(lease(made, capacity=2)):
        made.handle("a", failing(given, *[3] * (number == 0), rewards=np.arange(SIZE, dtype=np.float32)), 1.0)
    (batch,) = sent(made, "l", m.Batch)
    assert batch.all_groups.tolist() == [0, 0, 0, 1, 1, 1, 1] and batch.all_rewards.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.total_loss_tokens == 6 + 10 and batch.stats["critic/score/mean"] == pytest.approx(9 / 7)
    assert batch.stats["answers/left_out"] == batch.stats["answers/failed/reward_error"] == 1
    assert batch.stats["answers/left_out_length"] == 4 and batch.stats["answers/kept_length"] == pytest.approx(16 / 7)
    assert batch.stats["reward/error_rate"] == 1 / 8


def test_below_the_smallest_group_a_prompt_is_leased_again_and_poison_at_last():
    made = service(**GROUP, replay__max_attempts=2)
    (first,) = lease(made)
    answer = failing(first, 0, 1, 2)
    for _ in range(2):  # it comes twice: counted once
        made.handle("a", answer, 1.0)
    (second,) = lease(made)
    assert (second.index, second.attempt) == (first.index, 2)
    made.handle("a", failing(second, 0, 1, 2, 3, code="environment_error"), 1.0)
    assert [ack.status for ack in sent(made, "a", m.Ack)] == ["rejected"] * 3
    assert made.counters["dropped/poison"] == 1
    assert made.counters["answers_failed/reward_error"] == 3 and made.counters["answers_failed/environment_error"] == 4
    assert made.report.batch_stats()["buffer/dropped/poison"] == 1
    assert made.report.batch_stats()["answers/kept_length"] == 4, "of the one valid answer"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"errors": ["x"]}, "1 errors for 4 answers"),
        ({"errors": ["", "", "", "sys.exit"]}, "unknown error"),
        ({"errors": ["", "", "", "prompt_too_long"]}, "unknown error"),
        ({"left_out": np.array([0, 0, 0, 2], np.uint8)}, "left_out"),
        ({"left_out": np.array([1, 0, 0, 1], np.uint8)}, "left out that has not failed"),
        ({"errors": []}, "no error is named"),
        ({"samples": np.array([1, 0, 2, 1], np.int32)}, "samples"),
        ({"samples": np.array([1, 2, 2, -1], np.int32)}, "samples"),
    ],
)
def test_a_mask_that_contradicts_itself_is_refused(changed, said):
    made = service(**GROUP)
    (given,) = lease(made)
    made.handle("a", replace(failing(given, 3), **changed), 1.0)
    ack = sent(made, "a", m.Ack)[-1]
    assert ack.status == "rejected" and said in ack.reason and made.counters["groups_rejected"] == 1


@pytest.mark.parametrize(("code", "ending"), [("reward_error", "SLIP-REWARD-07"), ("environment_error", "SLIP-ENV-04")])
def test_too_large_a_share_of_failed_answers_ends_the_run(code, ending):
    made = service(**GROUP, replay__max_attempts=1000, num_rows=1000)
    answers = 0
    while not made.ended and answers < 2 * WINDOW:
        made.handle("a", failing(lease(made)[0], 0, 1, 2, code=code), 1.0)
        answers += SIZE
    assert answers == WINDOW, "a window that is not full says nothing"
    assert made.failed and ending in made.ended and "KeyError: 'answer'" in made.ended
    assert f"{WINDOW * 3 // 4} of the last {WINDOW} answers" in made.ended


def test_failures_before_the_first_successes_end_no_run():
    rate = ErrorRate(0.2)
    for _ in range(7):
        rate.add(16, 16)
    assert not rate.is_too_high and rate.share == 1
    for _ in range(40):
        rate.add(16, 0)
        assert not rate.is_too_high or rate.answers >= WINDOW
    assert rate.share == 0 and rate.answers == WINDOW


@drawn(st.data())
def test_a_masked_answer_is_as_if_it_had_never_been(data):
    """Whatever the shapes: several samples of a trajectory, prompts of their own, or neither."""
    n = data.draw(st.integers(2, 6))
    own, several = data.draw(st.booleans()), data.draw(st.booleans())
    out = data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(lambda marks: not all(marks)))
    samples = [data.draw(st.integers(0 if gone else 1, 3)) if several else 1 for gone in out]
    lengths = [data.draw(st.integers(1, 4)) for _ in range(sum(samples))]
    prompts = [data.draw(st.integers(1, 3)) for _ in lengths]
    numbers = np.arange(sum(lengths), dtype=np.int32)

    def group(stays):
        of_samples = np.repeat(stays, samples)
        of_tokens = np.repeat(of_samples, lengths)
        fields = {
            "finish_reasons": [str(i) for i in np.flatnonzero(stays)],
            "errors": ["reward_error" if out[i] else "" for i in np.flatnonzero(stays)],
            "rewards": np.arange(n, dtype=np.float32)[stays],
            "token_ids": numbers[of_tokens],
            "logprobs": -numbers[of_tokens].astype(np.float32),
            "versions": numbers[of_tokens],
            "loss_mask": (numbers % 2).astype(np.uint8)[of_tokens],
            "samples": np.array(samples, np.int32)[stays] if several else np.empty(0, np.int32),
        }
        if own:
            fields["prompt_lengths"] = np.array(prompts, np.int32)[of_samples]
            fields["prompt_ids"] = np.arange(sum(prompts), dtype=np.int32)[np.repeat(of_samples, prompts)]
        return make_group(np.array(lengths)[of_samples].tolist(), **fields)

    masked = replace(group(np.ones(n, bool)), left_out=np.array(out, np.uint8))
    expected = group(~np.array(out))
    for name in m.Group.__dataclass_fields__:
        assert name == "left_out" or np.array_equal(getattr(kept(masked), name), getattr(expected, name)), name
