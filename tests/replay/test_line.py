"""The line of policies: what a resumed learner takes again, and where the line ends when its weights are others."""

from replay import messages as m
from tests.replay.simulated_run import (
    group_message,
    learner,
    lease,
    make_step,
    sent,
    service,
    trains,
)


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


def test_on_divergence_stop_ends_the_run():
    made = service(replay__on_divergence="stop")
    diverged_at_2(made)
    assert made.failed and "replay.on_divergence is 'stop'" in made.ended


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
    assert made.granting.is_on_line(peer), "version 1 is what it was"
    peer.version = 2
    assert not made.granting.is_on_line(peer)
    made.handle("l2", m.Published(version=1, digest="d1"), 0.0)
    made.handle("l2", m.Take(step=2, rank=0), 0.0)
    for each in lease(made, version=1, capacity=50, incarnation=2):
        made.handle("a", group_message(each, [1]), 0.0)
    (batch,) = sent(made, "l2", m.Batch)
    assert batch.expected_digest == "" and not {tuple(group) for group in batch.group_ids} & {*ids[2], *ids[3]}
