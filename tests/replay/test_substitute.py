"""on_stale substitute: a group past its deadline gives its place to the next one, once, counted, and for good."""

from replay import messages as m
from tests.replay.simulated_run import group_message, lease, sent, service

OPTIONS = {"replay__on_stale": "substitute", "replay__substitute_after_s": 5.0, "replay__lease_s": 100}


def started(count=8):
    """Ranks ask for batch 1; server 'a' holds `count` leases since 0 s."""
    made = service(**OPTIONS)
    given = lease(made, capacity=count)
    made.handle("l", m.Take(step=1, rank=0), 0.0)
    return made, given


def finish(made, leases, now=1.0):
    for given in leases:
        made.handle("a", group_message(given, [0]), now)


def test_the_next_finished_group_takes_the_place_past_the_deadline():
    made, given = started()
    finish(made, [*given[:1], *given[2:5]])
    for now in (2.0, 4.9):
        made.tick(now)
        assert not sent(made, "l", m.Batch), "before the deadline it is waited for, as with `wait`"
    made.tick(5.1)
    (batch,) = sent(made, "l", m.Batch)
    assert [tuple(group) for group in batch.group_ids] == [(0, 0), (0, 2), (0, 3), (0, 4)]
    assert made.counters["dropped/substituted"] == 1
    assert [cancel.index for cancel in sent(made, "a", m.Cancel)] == [1]
    sent(made, "a", m.Ack)
    finish(made, [given[1]], 6.0)
    assert [ack.status for ack in sent(made, "a", m.Ack)] == ["superseded"], "late, it is not trained either"
    assert (0, 1) not in made.buffer.slots


def test_nothing_is_dropped_while_a_younger_group_is_waited_for_as_well():
    made, given = started(3)
    later = lease(made, capacity=6, now=6.0)
    finish(made, [*given[1:], *later[1:]], 6.0)
    made.tick(6.1)
    assert not made.counters["dropped/substituted"], "group 3 has just begun: group 0 may well be there before it"
    made.handle("a", m.Heartbeat(), 11.1)
    made.tick(11.2)
    assert made.counters["dropped/substituted"] == 2 and sent(made, "l", m.Batch)


def test_no_token_above_the_bound_comes_in():
    made, leases = started()
    slot = made.buffer.slots[(0, 7)]
    slot.min_version = 1
    given = next(each for each in leases if each.index == 7)
    made.handle("a", group_message(given, [0]), 1.0)
    assert "needs 1 or newer" in sent(made, "a", m.Ack)[-1].reason
