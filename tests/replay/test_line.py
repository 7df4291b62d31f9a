"""The line of policies: what a resumed learner takes again, and where the line ends when its weights are others."""

import dataclasses

import pytest

from replay import messages as m
from replay.journal import Location
from replay.state.leases import SlotState
from replay.state.line import LineStep, PolicyLine, TakenGroup
from tests.replay.simulated_run import (
    answering,
    gives_back,
    group_message,
    learner,
    lease,
    make_step,
    sent,
    service,
    trains,
)
from tests.replay.simulation.samples import make_result


def line_of(*steps):
    return PolicyLine(
        {step: LineStep([TakenGroup((0, step), 1, 0, Location(step, 0, ()))], 1, False, f"d{step}") for step in steps}
    )


def test_a_line_reaches_back_as_far_as_it_has_every_step():
    line = line_of(3, 4, 5)
    assert [line.reaches(version) for version in (1, 2, 3, 5)] == [False, True, True, True]
    assert (line.last, line.last_committed, line.ahead(3), len(line.groups_ahead(3))) == (5, 5, [4, 5], 2)
    line.steps[6] = LineStep([], 1, False)
    assert (line.last, line.last_committed) == (6, 5), "the last batch is out and not committed"


def test_a_checkpoint_makes_the_steps_before_it_superfluous_and_keeps_its_digest():
    line = line_of(3, 4, 5)
    line.forget(4)
    assert (sorted(line.steps), line.initial, line.first_segment()) == ([5], (4, "d4"), 5)
    assert (line.digest(4), line.digest(5), line.digest(3)) == ("d4", "d5", "")
    line.correct(4, "x")
    line.correct(5, "y")
    assert (line.digest(4), line.digest(5)) == ("x", "y")


def resumed_at(made, version, **fields):
    """Another learner starts there."""
    learner(made, "l2", version=version, **({"digest": f"d{version}"} | fields))
    return sent(made, "l2", m.Welcome)[-1]


def test_a_resumed_learner_gets_the_same_batches_with_their_digests_and_publishes_the_last_one():
    made = service()
    groups = [make_step(made, step, versions=[step - 1]) for step in (1, 2, 3)]
    welcome = resumed_at(made, 0)
    assert (welcome.incarnation, welcome.version, welcome.resumes_until) == (2, 0, 3)
    assert made.buffer.taken == 12 and made.buffer.room < 0, "nothing is admitted while these come again"
    for step, (ids, publishes) in enumerate(zip(groups, (False, False, True), strict=True), start=1):
        made.handle("l2", m.Take(step=step, rank=0), 0.0)
        (batch,) = sent(made, "l2", m.Batch)
        assert [tuple(group) for group in batch.group_ids] == ids
        assert (batch.expected_digest, batch.publish) == (f"d{step}", publishes)
        made.handle("l2", m.Committed(step=step, digest=f"d{step}"), 0.0)
    assert made.counters["groups_trained"] == 12, "repeated steps count once"
    assert made.counters["diverged"] == 0 and made.buffer.version == 3


def diverged_at_2(made):
    """Steps 1 and 2 are made, groups of versions 1 and 2 are here; another learner makes other weights of step 2."""
    for step in (1, 2):
        make_step(made, step, versions=[step - 1])
    old = next(iter(made.buffer.slots))
    new, running = lease(made, version=2, capacity=2)
    made.handle("a", group_message(new, [2]), 0.0)
    resumed_at(made, 1)
    trains(made, "l2", 2, "other")
    sent(made, "a", m.Lease)
    return old, new, running


def test_after_a_divergence_only_what_older_policies_sampled_counts():
    made = service()
    old, new, running = diverged_at_2(made)
    slots = made.buffer.slots
    assert made.counters["diverged"] == 1 and made.counters["superseded"] == 1
    assert slots[old].state is SlotState.BUFFERED
    assert slots[new.pass_, new.index].state is SlotState.QUEUED
    assert (running.pass_, running.index) in [(x.pass_, x.index) for x in sent(made, "a", m.Cancel)]
    made.handle("a", group_message(running, [2]), 0.0)
    assert sent(made, "a", m.Ack)[-1].status == "superseded", "begun with a policy that is gone"
    assert not lease(made, version=2, capacity=5), "the server still holds the policy that is gone"
    again = lease(made, version=2, capacity=5, incarnation=2)
    assert (new.pass_, new.index, 2) in [(x.pass_, x.index, x.attempt) for x in again]


def test_no_group_waits_for_itself_when_the_groups_before_it_are_dropped():
    """After a divergence more groups are queued than the bound admits, the last of them for versions to come."""
    made = service()
    for step in (1, 2):
        make_step(made, step, versions=[step - 1])
    resumed_at(made, 0, digest="other")
    assert [slot.min_version for slot in made.buffer.slots.values()] == [0] * 8 + [1] * 4
    for given in lease(made, capacity=8, incarnation=2):
        gives_back(made, given, "prompt_too_long")
    assert made.counters["dropped/prompt_too_long"] == 8 and made.buffer.version == 0
    assert len(made.buffer.slots) == 8 and len(sent(made, "a", m.Lease)) == 8


def test_a_finished_group_is_judged_by_the_incarnations_that_sampled_it():
    """Version 2 of the first learner was lost with its commit; the server has got version 2 of the second one since."""
    made = service()
    make_step(made, 1, versions=[0])
    of_the_lost, of_the_line, *_ = lease(made, version=1, capacity=9)
    made.handle("l", m.Take(step=2, rank=0), 0.0)  # from here on version 2 is possible; its commit never comes
    resumed_at(made, 1)
    trains(made, "l2", 2, "d2")
    lease(made, version=2, incarnation=2, capacity=0)
    for given, policies in ((of_the_lost, [[1, 1], [1, 2]]), (of_the_line, [[1, 1], [2, 2]])):
        group = dataclasses.replace(group_message(given, [1, 2]), policies=policies)
        made.handle("a", group, 2.0)
    assert [ack.status for ack in sent(made, "a", m.Ack)[-2:]] == ["superseded", "accepted"]
    slot = made.buffer.slots[of_the_lost.pass_, of_the_lost.index]
    assert slot.group is None and slot.voided == 1


def test_a_late_group_of_an_expired_lease_does_not_bring_a_policy_back_that_is_gone():
    made = service()
    make_step(made, 1, versions=[0])
    (first,) = lease(made, version=1)
    made.handle("a", m.LeaseRequest(capacity=0, version=1, incarnation=1), 0.0)
    made.leasing.expire(100.0)
    resumed_at(made, 0)
    trains(made, "l2", 1, "other")
    made.handle("a", m.LeaseRequest(capacity=0, version=1, incarnation=2), 0.0)
    made.handle("a", group_message(first, [1]), 0.0)
    assert sent(made, "a", m.Ack)[-1].status == "superseded"


def unproven(made):
    """Batch 2 is out; server 'a' has a version 2 that nobody has told replay of, and a group that is of it in part."""
    make_step(made, 1)
    here, running, *_ = lease(made, version=1, capacity=4)
    made.handle("l", m.Take(step=2, rank=0), 0.0)
    assert sent(made, "l", m.Batch)
    made.handle("a", m.LeaseRequest(capacity=4, version=2, incarnation=1), 0.0)
    sent(made, "a", m.Ack)
    made.handle("a", group_message(here, [1, 2]), 0.0)
    assert not sent(made, "a", m.Ack)
    return here, running


def test_a_group_of_a_version_that_is_not_committed_waits_for_its_commit():
    made = service()
    here, _ = unproven(made)
    made.handle("l", m.Committed(step=2, digest="d2"), 0.0)
    made.handle("a", group_message(here, [1, 2]), 0.0)
    assert sent(made, "a", m.Ack)[-1].status == "accepted"


def test_a_version_that_died_with_its_learner_before_its_commit_is_not_trusted():
    made = service()
    here, running = unproven(made)
    resumed_at(made, 1)
    assert {(x.pass_, x.index) for x in sent(made, "a", m.Cancel)} >= {(x.pass_, x.index) for x in (here, running)}
    trains(made, "l2", 2, "other")
    assert made.counters["diverged"] == 0, "nobody knows what it was"
    for given in (here, running):
        made.handle("a", group_message(given, [1, 2]), 0.0)
        assert sent(made, "a", m.Ack)[-1].status == "superseded"
    assert not lease(made, version=2, capacity=5)
    assert lease(made, version=2, capacity=5, incarnation=2)


def test_a_version_of_a_learner_that_had_not_come_that_far_again_is_not_trusted():
    made = service()
    for step in (1, 2):
        make_step(made, step, versions=[step - 1])
    resumed_at(made, 0)
    peer = made.peers.get("a")
    learner(made, "l3", version=0)
    peer.incarnation, peer.version = 1, 2
    assert made.leasing.is_on_line(peer), "the first learner's step 2 is in the journal"
    peer.incarnation, peer.version = 2, 1
    assert not made.leasing.is_on_line(peer), "the second one's step 1 is not: its weights may have been others"


def test_on_divergence_stop_ends_the_run():
    made = service(replay__on_divergence="stop")
    diverged_at_2(made)
    assert made.failed and "replay.on_divergence is 'stop'" in made.ended


def test_an_evaluation_of_a_policy_that_is_gone_is_made_anew():
    made = service(evaluated=1)
    made.handle("l", m.Evaluate(version=1), 0.0)
    make_step(made, 1, versions=[0])
    made.handle("a", m.LeaseRequest(capacity=0, version=1, incarnation=1), 0.0)
    made.handle("a", answering(made, make_result(1)), 0.0)
    assert made.evaluations.board.closed == {1: ""}
    resumed_at(made, 1, digest="d1")
    made.handle("l2", m.Evaluate(version=1), 0.0)
    assert len(sent(made, "l2", m.EvaluationResult)) == 1, "the same policy: its result is known"
    learner(made, "l3", version=1, digest="other")
    made.handle("l3", m.Evaluate(version=1), 0.0)
    assert not sent(made, "l3", m.EvaluationResult)
    made.handle("a", m.LeaseRequest(capacity=0, version=1, incarnation=2), 0.0)
    made.handle("a", m.LeaseRequest(capacity=0, version=1, incarnation=3), 0.0)
    assert len(sent(made, "a", m.EvaluationLease)) == 2, "at first, and again once the new policy is live"


def test_an_evaluation_waits_for_servers_whose_policy_is_lost():
    """They are past its version on a line that has ended, and get it with the new one."""
    made = service(evaluated=1)
    for step in (1, 2, 3):
        make_step(made, step, versions=[step - 1])
    for name in ("a", "b"):
        made.handle(name, m.LeaseRequest(capacity=0, version=3, incarnation=1), 0.0)
    resumed_at(made, 1, rolls_back=True)
    made.handle("l2", m.Evaluate(version=2), 0.0)
    made.tick(1.0)
    assert made.evaluations.board.open
    made.handle("b", m.LeaseRequest(capacity=0, version=1, incarnation=2), 2.0)
    made.tick(2.0)
    assert made.evaluations.board.open, "a is where it was, and b before version 2"


def test_a_roll_back_drops_what_it_takes_back_and_samples_anew_what_later_policies_sampled():
    made = service()
    ids = {step: make_step(made, step, versions=[step - 1]) for step in (1, 2, 3)}
    given, running = lease(made, version=3, capacity=2)
    made.handle("a", group_message(given, [3]), 0.0)
    welcome = resumed_at(made, 1, rolls_back=True)
    assert (welcome.incarnation, welcome.version, welcome.resumes_until) == (2, 1, 1), "nothing comes again"
    slots, counters = made.buffer.slots, made.counters
    assert not set(slots) & {*ids[2], *ids[3]} and counters["dropped/rolled_back"] == 8
    assert (counters["rolled_back"], counters["diverged"], made.ended) == (1, 0, None)
    assert slots[given.pass_, given.index].group is None and slots[running.pass_, running.index].voided == 1
    peer = made.peers.get("a")
    peer.incarnation, peer.version = 1, 1
    assert made.leasing.is_on_line(peer), "version 1 is what it was"
    peer.version = 2
    assert not made.leasing.is_on_line(peer)
    made.handle("l2", m.Published(version=1, digest="d1"), 0.0)
    made.handle("l2", m.Take(step=2, rank=0), 0.0)
    for each in lease(made, version=1, capacity=50, incarnation=2):
        made.handle("a", group_message(each, [1]), 0.0)
    (batch,) = sent(made, "l2", m.Batch)
    assert batch.expected_digest == "" and not {tuple(group) for group in batch.group_ids} & {*ids[2], *ids[3]}


def test_a_lower_bound_of_the_lag_holds_for_what_is_admitted_from_then_on():
    made = service(replay__async_lag=2)
    early = lease(made, capacity=50)
    assert (len(early), made.buffer.room) == (12, 0)
    for bound in (1, 1, 5):
        made.handle("l", m.LowerLag(step=0, async_lag=bound), 0.0)
    assert (made.buffer.async_lag, made.counters["lag_lowered"]) == (1, 1), "once, and never up"
    for given in early:
        made.handle("a", group_message(given, [0]), 0.0)
    for step in (1, 2, 3):  # under way, and still taken at the lag that they were admitted under
        trains(made, "l", step, f"d{step}")
        (batch,) = sent(made, "l", m.Batch)
        assert batch.lag_histogram == {str(step - 1): 8}
        late = lease(made, version=step, capacity=50)
        assert all(given.min_version >= step for given in late) and made.buffer.in_flight <= max(8, 12 - 4 * step)


@pytest.mark.parametrize("held", [False, True])
def test_a_group_that_was_too_old_is_not_taken_in_again(held):
    made = service(replay__on_stale="drop", replay__async_lag=0)
    (given,) = lease(made)
    made.handle("a", group_message(given, [0]), 0.0)
    slot = made.buffer.slots[given.pass_, given.index]
    made.leasing.treat_stale([slot])
    if held:
        lease(made, "b")
    sent(made, "a", m.Ack)
    made.handle("a", group_message(given, [0]), 0.0)
    assert sent(made, "a", m.Ack)[-1].status == "superseded" and slot.group is None
