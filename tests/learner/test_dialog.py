"""A rank's dialog with replay, message by message. Whole runs: tests/replay/test_simulation.py."""

from pathlib import Path
from typing import Any

import pytest

from learner.dialog import Dialog, RunEnded
from learner.train import REFUSALS
from replay import messages as m
from replay.channel import ChannelError
from tests.learner.recorded import batch_of, random_step
from tests.learner.tiny_models import make_config
from tests.replay.simulation.samples import make_result

HELLO = m.Hello(role="learner", name="learner-0", pid=1, host="h", cursor={"version": 2})
PART = batch_of(random_step(3), 3, rank=0, world_size=1)
DEADLINE_S, SILENT_S = 100.0, 30.0


@pytest.fixture
def dialog() -> Dialog:
    """Of rank 0, which is welcome as incarnation 4."""
    waits = {"learner": {"batch_deadline_s": DEADLINE_S}, "network": {"silent_after_s": SILENT_S}}
    made = Dialog(make_config(Path("none"), **waits), 0, 0.0)
    made.ask(HELLO, m.Welcome, "Welcome", 0.0)
    made.hear(m.Welcome(incarnation=4, version=2, bus_address=None), 0.0)
    return made


def said(dialog: Dialog) -> list[Any]:
    found = list(dialog.outbox)
    dialog.outbox.clear()
    return found


def asked(dialog: Dialog, now: float) -> list[Any]:
    dialog.advance(now)
    return said(dialog)


def test_a_question_is_repeated_until_it_is_answered(dialog: Dialog) -> None:
    dialog.take(3, 1.0)
    take = m.Take(step=3, rank=0, have=False)
    assert [asked(dialog, now) for now in (1.0, 2.9, 3.0, 4.9, 5.1)] == [[take], [], [take], [], [take]]
    dialog.hear(m.Heartbeat(), 5.2)
    assert dialog.answer is None
    dialog.hear(PART, 5.3)
    assert dialog.answer is PART and asked(dialog, 99.0) == []
    dialog.take(3, 6.0, have=True)
    assert dialog.answer is None and asked(dialog, 6.0) == [m.Take(step=3, rank=0, have=True)]
    dialog.hear(m.Proceed(step=3), 6.1)
    assert isinstance(dialog.answer, m.Proceed)


def test_an_answer_is_that_of_its_step_and_kind(dialog: Dialog) -> None:
    dialog.take(4, 1.0)
    for other in (PART, m.Proceed(step=4), m.Status(state={})):
        dialog.hear(other, 1.0)
        assert dialog.answer is None
    dialog.ask(m.StatusRequest(), m.Status, "its status", 2.0)
    dialog.hear(m.Status(state={"a": 1}), 2.0)
    assert dialog.answer == m.Status(state={"a": 1})


def test_the_last_commit_goes_with_a_repeated_question(dialog: Dialog) -> None:
    """A commit that was lost with a connection would leave replay and all ranks waiting for each other."""
    for step in (1, 2):
        dialog.announce(m.Committed(step=step, digest=f"d{step}"))
    assert [one.step for one in said(dialog)] == [1, 2]
    dialog.take(3, 1.0)
    assert [type(x) for x in asked(dialog, 1.0)] == [m.Take]
    assert asked(dialog, 3.1) == [m.Committed(step=2, digest="d2"), m.Take(step=3, rank=0, have=False)]


def test_a_replay_that_knows_nobody_gets_hello_and_all_that_was_said(dialog: Dialog) -> None:
    words = [
        m.Committed(step=2, digest="d"), m.Published(version=2, digest="d"), m.Evaluate(version=1),
        m.Evaluate(version=2), m.Checkpointed(step=2),
    ]  # fmt: skip
    for word in (m.Published(version=1, digest="c"), *words):
        dialog.announce(word)
    dialog.take(3, 1.0)
    asked(dialog, 1.0)
    dialog.hear(m.Refused(reason="any words", code="hello"), 2.0)
    hello, *others = said(dialog)
    assert (hello.incarnation, hello.cursor, hello.name) == (4, None, "learner-0")
    assert sorted(map(repr, others)) == sorted(map(repr, [*words, m.Take(step=3, rank=0, have=False)]))
    for now, count in ((2.1, 0), (2.9, 0), (3.1, 7)):  # each of its messages is refused: one answer to all
        dialog.hear(m.Refused(reason="", code="hello"), now)
        assert len(said(dialog)) == count


def test_a_part_that_did_not_come_before_the_word_that_it_was_sent_is_lost(dialog: Dialog) -> None:
    dialog.take(3, 1.0)
    asked(dialog, 1.0)
    dialog.hear(m.Sent(step=2), 2.0)
    assert not said(dialog)
    dialog.hear(m.Sent(step=3), 2.0)
    assert [type(x) for x in said(dialog)] == [m.Hello, m.Take]
    dialog.hear(PART, 3.0)
    dialog.hear(m.Sent(step=3), 9.0)
    dialog.take(3, 9.0, have=True)
    dialog.hear(m.Sent(step=3), 19.0)
    assert not said(dialog), "it is here"


def test_another_refusal_and_the_end_of_the_run_are_errors(dialog: Dialog) -> None:
    for incarnation, ends_the_run in ((0, True), (1, False)):
        dialog.incarnation = incarnation
        with pytest.raises(ChannelError, match="any words") as raised:
            dialog.hear(m.Refused(reason="any words"), 1.0)
        assert isinstance(raised.value, REFUSALS) is ends_the_run
    with pytest.raises(RunEnded, match="over"):
        dialog.hear(m.Goodbye(reason="over"), 1.0)
    fresh = Dialog(make_config(Path("none")), 0, 0.0)
    with pytest.raises(ChannelError):
        fresh.hear(m.Refused(reason="before any Hello", code="hello"), 1.0)


def test_silence_and_slowness_are_told_apart(dialog: Dialog) -> None:
    dialog.take(3, 10.0)
    assert dialog.overdue(10.0 + SILENT_S) is None
    late = dialog.overdue(10.1 + SILENT_S)
    assert late is not None and (late.symptom, late.key) == ("silent", "network.silent_after_s")
    assert late.what.startswith("batch 3") and late.waited_s == pytest.approx(30.1)
    for now in (30.0, 60.0, 90.0):
        dialog.hear(m.Heartbeat(), now)
    assert dialog.overdue(109.9) is None
    late = dialog.overdue(10.0 + DEADLINE_S)
    assert late is not None and (late.symptom, late.key) == ("slow", "learner.batch_deadline_s")
    dialog.take(3, 105.0, have=True, since=10.0)
    assert dialog.overdue(111.0) is not None, "the deadline is of the whole wait for a batch"


def test_deadlines_stand_still_while_replay_waits_for_its_disk(dialog: Dialog) -> None:
    limit = int(DEADLINE_S)
    dialog.take(1, 0.0)
    for now in range(1, 3 * limit):
        dialog.hear(m.Heartbeat(blocked="disk"), float(now))
        assert dialog.overdue(float(now)) is None
    dialog.hear(m.Heartbeat(), 4.0 * limit)
    assert (late := dialog.overdue(4.0 * limit)) is not None and late.key == "learner.batch_deadline_s"


def test_silence_before_a_wait_does_not_count(dialog: Dialog) -> None:
    dialog.announce(m.Evaluate(version=1))
    dialog.wait(500.0)
    assert dialog.overdue(500.0 + SILENT_S, "x") is None
    late = dialog.overdue(501.0 + SILENT_S, "x")
    assert late is not None and (late.what, late.symptom) == ("x", "silent")


def test_evaluations_are_open_until_they_are_closed_and_their_results_are_kept(dialog: Dialog) -> None:
    for version in (7, 5):
        dialog.announce(m.Evaluate(version=version))
    assert dialog.oldest_evaluation() == 5
    result = make_result(5)
    dialog.hear(result, 1.0)
    dialog.hear(m.EvaluationClosed(version=5, reason="too late"), 1.0)
    assert dialog.inbox.results == [result] and dialog.inbox.closed == {5: "too late"}
    assert dialog.oldest_evaluation() == 7
    dialog.close_evaluation(7, "here")
    assert dialog.oldest_evaluation() is None and dialog.inbox.closed[7] == "here"
    said(dialog)
    dialog.hear(m.Refused(reason="", code="hello"), 2.0)
    assert [type(x) for x in said(dialog)] == [m.Hello]
