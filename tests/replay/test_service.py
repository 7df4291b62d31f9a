"""The replay protocol message by message. Whole runs with every kind of fault: tests/replay/test_simulation.py."""

import asyncio
import dataclasses
from functools import partial

import numpy as np
import pytest

from configs.shared import shared_values
from replay import messages as m
from replay.channel import WireError
from replay.serve import beat
from replay.state.leases import SlotState
from tests.replay.simulated_run import (
    answering,
    bare_service,
    finishes,
    group_message,
    joins,
    learner,
    lease,
    make_step,
    sent,
    service,
    trains,
)
from tests.replay.simulation.samples import make_result


def test_a_group_that_is_sent_twice_is_acked_twice_and_kept_once():
    made = service()
    (given,) = lease(made)
    for _ in range(2):
        made.handle("a", group_message(given, [0]), 1.0)
    assert [a.status for a in sent(made, "a", m.Ack)] == ["accepted", "accepted"]
    assert made.buffer.count(SlotState.BUFFERED) == 1
    assert made.counters["duplicate_groups"] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": np.array([7, 7], dtype=np.int32)}, "tokens of version 7"),
        ({"logprobs": np.array([np.nan, 0], dtype=np.float32)}, "not finite"),
        ({"logprobs": np.array([0.5, 0], dtype=np.float32)}, "positive logprob"),
        ({"rewards": np.array([np.inf, 0], dtype=np.float32)}, "reward that is not finite"),
        ({"lengths": np.array([2, 1], dtype=np.int32)}, "entries for 3 tokens"),
        ({"token_ids": np.array([-1, 0], dtype=np.int32)}, "negative token"),
        ({"token_ids": np.array([50, 0], dtype=np.int32)}, "token id 50 of a vocabulary of 50"),
        ({"lengths": np.array([2], dtype=np.int32)}, "a group has 2"),
        ({"attempt": 9}, "never leased"),
        ({"policies": [[1, 0], [1, 3]]}, "newest token is of version 0"),
        ({"policies": [[1]]}, "not [incarnation, version]"),
    ],
)
def test_a_group_that_cannot_be_true_is_rejected_by_name(change, message):
    made = service()
    made.leasing.vocab_size = 50
    (given,) = lease(made)
    made.handle("a", dataclasses.replace(group_message(given, [0]), **change), 1.0)
    ack = sent(made, "a", m.Ack)[-1]
    assert ack.status == "rejected" and message in ack.reason
    assert made.buffer.count(SlotState.BUFFERED) == 0


def test_ranks_proceed_only_when_all_hold_their_part():
    made = service(ranks=2, replay__async_lag=0)
    finishes(made, 9, [0])
    made.handle("l", m.Take(step=1, rank=0), 1.0)
    assert not sent(made, "l", m.Batch), "a batch goes out when all ranks have asked"
    waits = [(wait["who"], wait["for"]) for wait in made.report.waits.of(2.0, 0.0)]
    assert ("learner-0", "learner-1 to ask for batch 1") in waits
    made.handle("l1", m.Take(step=1, rank=1), 1.0)
    assert sent(made, "l", m.Batch) and sent(made, "l1", m.Batch)
    made.handle("l", m.Take(step=1, rank=0, have=True), 1.0)
    assert not sent(made, "l", m.Proceed)
    waits = [(wait["who"], wait["for"]) for wait in made.report.waits.of(2.0, 0.0)]
    assert ("learner-0", "learner-1 to hold batch 1") in waits
    made.handle("l1", m.Take(step=1, rank=1, have=True), 1.0)
    assert sent(made, "l", m.Proceed) and sent(made, "l1", m.Proceed)


def test_ranks_of_a_new_learner_wait_for_each_other_in_a_step_that_their_predecessors_had_begun():
    made = service(ranks=2, replay__async_lag=0)
    finishes(made, 9, [0])
    for first, second in (("l", "l1"), ("n", "n1")):
        if first == "n":
            learner(made, first, now=2.0)
            learner(made, second, now=2.0, name="learner-1", rank=1)
        made.handle(first, m.Take(step=1, rank=0), 2.0)
        made.handle(second, m.Take(step=1, rank=1), 2.0)
        assert sent(made, first, m.Batch) and sent(made, second, m.Batch)
        made.handle(first, m.Take(step=1, rank=0, have=True), 2.0)
        assert not sent(made, first, m.Proceed), "the other one has not got its part"
        made.handle(second, m.Take(step=1, rank=1, have=True), 2.0)
        assert sent(made, first, m.Proceed) and sent(made, second, m.Proceed)


def test_ranks_that_compute_the_same_rows_hold_the_same_part():
    made = service(ranks=4, placement__split="1:4", learner__mesh={"tensor": 2}, replay__async_lag=0)
    ranks = ["l", "l1", "l2", "l3"]
    finishes(made, 9, [0])
    for number, rank in enumerate(ranks):
        made.handle(rank, m.Take(step=1, rank=number), 1.0)
    parts = [sent(made, rank, m.Batch)[-1] for rank in ranks]
    assert parts[0] is parts[1] and parts[2] is parts[3]
    divided = np.concatenate([parts[0].trajectory, parts[2].trajectory])
    assert sorted(divided) == list(range(len(parts[0].all_rewards))), "each trajectory is of one part"
    for number, rank in enumerate(ranks):
        assert not any(sent(made, other, m.Proceed) for other in ranks)
        made.handle(rank, m.Take(step=1, rank=number, have=True), 1.0)
    assert all(sent(made, rank, m.Proceed) for rank in ranks)


def test_idle_engines_are_counted_over_whole_cycles_of_batches():
    """At a lag bound of one, of two batches one is waited for: the beat before each is always of the same kind."""
    made = service(replay__async_lag=1)
    for step, beats in enumerate([[0.9], [0.0, 0.0, 0.4], [0.8], [0.0, 0.0, 0.4]], 1):
        for idle in beats:
            made.handle("b", m.Heartbeat(gauges={"idle_ratio": idle}), 1.0)
        made.report.batch_stats()  # an endpoint reads it, and takes nothing away
        made.handle("l", m.Take(step=step, rank=0), 1.0)
        for given in lease(made, capacity=4, version=step - 1):
            made.handle("a", group_message(given, [step - 1]), 1.0)
        batch = sent(made, "l", m.Batch)[-1]
        made.handle("l", m.Committed(step=step, digest=f"d{step}"), 1.0)
    assert batch.stats["rollout/idle_ratio"] == pytest.approx((0.8 + 0.4) / 4)


def test_a_batch_that_is_formed_is_sent_and_journalled_once_until_somebody_asks_again():
    made = service()
    finishes(made, 4, [0, 0])
    made.handle("l", m.Take(step=1, rank=0), 1.0)
    for second in range(5):
        made.tick(1.0 + second)
        made.handle("b", m.Heartbeat(), 1.0 + second)
    takes = [record for record in made.journal.records if record.kind == "take"]
    assert len(sent(made, "l", m.Batch)) == 1 and len(takes) == 1
    for second in (3.0, 5.0, 7.0):  # a part that takes its time is on the way once
        made.handle("l", m.Take(step=1, rank=0), second)
    assert not sent(made, "l", m.Batch) and sent(made, "l", m.Sent) == [m.Sent(step=1)] * 3
    learner(made, "l")
    made.handle("l", m.Take(step=1, rank=0), 8.0)
    assert len(sent(made, "l", m.Batch)) == 1 and made.journal.records.count(takes[0]) == 1


def test_silent_servers_lose_their_leases_and_must_say_hello_again():
    made = service(replay__lease_s=60)
    assert len(lease(made, capacity=2)) == 2
    made.handle("b", m.Heartbeat(), 10.0)
    made.tick(10.5)
    assert made.peers.get("a") is None and made.counters["servers_lost"] == 1
    assert made.buffer.count(SlotState.QUEUED) == 2
    made.handle("a", m.Heartbeat(), 11.0)
    assert sent(made, "a", m.Refused)[-1].code == "hello"
    state = partial(made.report.of, 11.0, ended=None, no_server_since=0.0)
    assert state()["silent"] == [{"name": "rollout-a", "pid": 2, "host": "h"}], "its launcher ends it by this"
    joins(made, "a", 11.0)
    assert state()["silent"] == []


def test_a_run_without_any_server_ends_with_a_reason_and_a_hang_report(reported):
    made = service(rollout__wait_for_servers_s=5)
    made.lost("a", "closed", 1.0)
    made.lost("b", "closed", 1.0)
    made.tick(1.0)
    made.tick(3.0)
    assert made.ended is None
    made.tick(8.0)
    assert made.failed and "no rollout server for 5 s" in made.ended
    assert sent(made, "l", m.Goodbye)[-1].failed
    assert reported() == "me waited 5.0 s for a rollout server (rollout.wait_for_servers_s)"


@pytest.mark.parametrize(
    ("role", "rank", "theirs", "named"),
    [
        ("rollout_server", 0, {"tokenizer": "bbb"}, ["tokenizer is bbb there and aaa in this run"]),
        ("rollout_server", 0, {"reward.function": '"math"'}, ['reward.function is "math" there and "exact" in']),
        ("rollout_server", 0, {"learner.lr": "1e-06", "limits.kl": '""'}, []),
        (
            *("learner", 1, {"learner.lr": "1e-06", "algorithm.loss": '"gspo"', "run.seed": "7"}),
            ["learner.lr is 1e-06 there and 0.0005 in", "algorithm.loss is", "run.seed is 7 there and 0 in"],
        ),
        ("learner", 1, {}, []),
    ],
)
def test_a_peer_of_another_configuration_is_refused_with_every_key_and_both_values(role, rank, theirs, named):
    made = service(learner__lr=5e-4, reward__function="exact")
    made.peers.expected = {"tokenizer": "aaa", **shared_values(made.config)}
    given = {**made.peers.expected, **theirs}
    hello = m.Hello(role=role, name="other", pid=9, host="h", rank=rank, world_size=2, fingerprint=given)
    made.handle("c", hello, 1.0)
    reasons = [refused.reason for refused in sent(made, "c", m.Refused)]
    assert bool(reasons) == bool(named) == (made.peers.get("c") is None)
    assert all(text in reasons[-1] for text in named)


def test_the_cursor_restores_data_and_leases_lost_prompts_again():
    made = service()
    leases = finishes(made, 8, [0])
    trains(made, "l", 1, "d")
    made.handle("l", m.CursorRequest(step=1), 1.0)
    cursor = next(said for _, said in made.sayable(1.0) if isinstance(said, m.Cursor))

    resumed = bare_service()
    resumed.counters.update(groups_accepted=3, groups_trained=2)  # of a journal that ends before the checkpoint
    learner(resumed, "l", version=1, cursor=cursor.state)
    assert (resumed.incarnation, resumed.buffer.version) == (2, 1)
    assert resumed.counters["resume_without_journal"] == 4
    restored = {name: count for name, count in resumed.counters.items() if name != "resume_without_journal"}
    assert restored == cursor.state["counters"], "restored, and not added to what was counted before"
    joins(resumed, "a")
    again = [(x.pass_, x.index) for x in lease(resumed, capacity=8, version=1, incarnation=0)]
    assert again == [(x.pass_, x.index) for x in leases[4:]] + [(0, 8), (0, 9), (0, 10), (0, 11)], again


def test_evaluations_run_at_one_server_and_move_when_it_dies():
    made = service(evaluated=3, evaluation__sampled=True)
    made.handle("l", m.Evaluate(version=0), 0.0)
    made.handle("a", m.LeaseRequest(capacity=0, version=0), 0.0)
    made.handle("b", m.LeaseRequest(capacity=0, version=0), 0.0)
    assert [x.greedy for x in sent(made, "a", m.EvaluationLease)] == [True, False]
    assert not sent(made, "b", m.EvaluationLease)

    made.handle("a", answering(made, make_result(0, greedy=True, n=3)), 1.0)
    made.lost("a", "closed", 1.0)
    assert [x.greedy for x in sent(made, "b", m.EvaluationLease)] == [False]
    made.handle("b", answering(made, make_result(0, greedy=False, n=3)), 2.0)
    assert len(sent(made, "l", m.EvaluationResult)) == 2
    assert sent(made, "b", m.EvaluationClosed)[-1].version == 0


def test_an_evaluation_that_fails_everywhere_is_given_up():
    made = service(evaluated=1)
    made.handle("l", m.Evaluate(version=0), 0.0)
    for server in ("a", "b"):
        made.handle(server, m.LeaseRequest(capacity=0, version=0), 0.0)
    asked = []
    while made.evaluations.board.open:
        (server,) = [who for who in ("a", "b") if sent(made, who, m.EvaluationLease)]
        asked.append(server)
        made.handle(server, m.EvaluationFailed(version=0, reason="not held"), 1.0)
    assert asked == ["a", "b", "a", "b"] and "every server" in made.evaluations.board.closed[0]


def test_overdue_evaluations_are_closed_with_a_reason():
    made = service(evaluated=1, evaluation__deadline_s=5)
    made.handle("l", m.Evaluate(version=0), 0.0)
    made.handle("b", m.Heartbeat(), 6.0)
    made.handle("a", m.Heartbeat(), 6.0)
    made.tick(6.0)
    assert "no server holds that version" in sent(made, "l", m.EvaluationClosed)[-1].reason


def test_who_is_late_with_an_evaluation_is_named_and_its_identity_is_not():
    made = service(evaluated=1, evaluation__deadline_s=5)
    joins(made, "rollout-7.1f3a")
    made.handle("l", m.Evaluate(version=0), 0.0)
    made.handle("rollout-7.1f3a", m.LeaseRequest(capacity=0, version=0), 0.0)
    assert sent(made, "rollout-7.1f3a", m.EvaluationLease)
    made.handle("rollout-7.1f3a", m.Heartbeat(), 6.0)
    made.tick(6.0)
    assert "(at rollout-7)" in sent(made, "l", m.EvaluationClosed)[-1].reason


def test_an_evaluation_that_no_server_can_do_any_more_is_closed_at_once():
    """Its only server died with it; the others, and the one in its place, are past that version."""
    made = service(evaluated=1)
    made.handle("l", m.Evaluate(version=0), 0.0)
    made.handle("a", m.LeaseRequest(capacity=0, version=0), 0.0)
    assert sent(made, "a", m.EvaluationLease)
    make_step(made, 1)
    made.lost("a", "closed", 1.0)
    made.tick(1.0)
    assert made.evaluations.board.open, "b may still report it"
    made.handle("b", m.LeaseRequest(capacity=0, version=1, incarnation=1), 2.0)
    made.tick(2.0)
    (closed,) = sent(made, "l", m.EvaluationClosed)
    assert (closed.version, closed.reason) == (0, "no server holds that version any more")


def test_an_evaluation_is_not_given_up_while_a_server_may_come_back_with_it():
    made = service(evaluated=1)
    made.handle("l", m.Evaluate(version=0), 0.0)
    made.handle("a", m.LeaseRequest(capacity=0, version=0), 0.0)
    make_step(made, 1)
    for server in ("a", "b"):
        made.handle(server, m.LeaseRequest(capacity=0, version=1, incarnation=1), 2.0)
    made.tick(2.0)
    assert made.evaluations.board.open, "a has it"
    made.lost("a", "silent", 3.0)
    joins(made, "a")
    made.handle("a", m.LeaseRequest(capacity=0, version=1, incarnation=1), 4.0)
    made.tick(4.0)
    assert made.evaluations.board.open, "a goes on with what it was asked for"
    made.lost("a", "silent", 5.0)
    made.missing["a"] = 7.0
    made.tick(6.0)
    assert made.evaluations.board.open, "replay was restarted, and waits for a"
    made.handle("b", m.Heartbeat(), 8.0)
    made.tick(8.0)
    assert not made.evaluations.board.open


def test_a_rank_that_is_done_before_rank_0_is_not_lost():
    made = service(ranks=2, rollout__wait_for_servers_s=1e6)
    made.handle("l1", m.Goodbye(reason="all steps are done", failed=False), 1.0)
    assert made.peers.get("l1") is None and made.peers.gone["l1"] == "all steps are done" and made.ended is None
    made.handle("l", m.Goodbye(reason="all steps are done", failed=False), 2.0)
    assert made.ended == "all steps are done" and made.counters["learner_ranks_lost"] == 0


def test_leases_are_spread_over_servers():
    made = service(replay__async_lag=0)
    made.receive("a", m.LeaseRequest(capacity=8, version=0), 0.0)
    made.receive("b", m.LeaseRequest(capacity=8, version=0), 0.0)
    made.advance(0.0)
    assert (len(sent(made, "a", m.Lease)), len(sent(made, "b", m.Lease))) == (2, 2)


def test_take_is_for_the_rank_that_asks_and_for_the_step_that_is_next():
    made = service()
    made.handle("l", m.Take(step=1, rank=3), 0.0)
    assert "is not that rank" in sent(made, "l", m.Refused)[-1].reason
    made.handle("a", m.Take(step=1, rank=0, have=True), 0.0)
    assert "is not that rank" in sent(made, "a", m.Refused)[-1].reason
    for step in (0, 3, 10**9):
        made.handle("l", m.Take(step=step, rank=0), 0.0)
    assert made.batching.takes == {} and made.batching.haves == {}


def test_the_run_waits_for_a_learner_rank_that_is_gone_and_then_ends():
    made = service(replay__wait_for_learner_s=20, rollout__wait_for_servers_s=1e6)
    made.unreachable("l", 1.0)
    made.tick(5.0)
    made.handle("l", m.Heartbeat(), 6.0)
    made.tick(15.0)
    assert made.peers.get("l") is not None, "it came back"
    made.unreachable("l", 16.0)
    made.tick(27.0)
    assert made.peers.get("l") is None and made.counters["learner_ranks_lost"] == 1
    made.tick(34.0)
    assert made.ended is None, "the launcher may start it again"
    made.tick(36.0)
    assert made.failed and "no learner for 20 s (replay.wait_for_learner_s)" in made.ended


def test_a_learner_whose_connection_comes_back_in_a_long_step_is_not_lost():
    """It sends nothing while it computes: what replay can send it shows that it is there."""
    made = service(replay__wait_for_learner_s=20, rollout__wait_for_servers_s=1e6)
    gone = {"l"}

    class Router:
        refused = 0

        async def send(self, identity, _):
            return identity not in gone

    asyncio.run(beat(Router(), made, 1.0))
    gone.clear()
    for now in range(2, 60):
        asyncio.run(beat(Router(), made, float(now)))
        made.tick(float(now))
    assert made.peers.get("l") is not None and made.ended is None
    gone.add("l")
    for now in range(60, 120):
        asyncio.run(beat(Router(), made, float(now)))
        made.tick(float(now))
    assert made.peers.get("l") is None and made.failed


def test_an_update_longer_than_every_deadline_ends_no_run(caplog):
    """It beats and says what it does; a line names it once within each deadline."""
    made = service(rollout__wait_for_servers_s=1e6)
    limit = made.config.learner.batch_deadline_s
    for now in range(2, 2 * int(limit), 2):
        made.handle("l", m.Heartbeat(activity="training step 2", since_s=now - 2.0), float(now))
        made.tick(float(now))
    assert made.ended is None and made.peers.rank(0) is not None
    assert sum("has been training step 2" in record.getMessage() for record in caplog.records) == 1


def test_a_learner_that_waits_for_its_disk_is_not_lost_while_it_says_so():
    """A checkpoint may take checkpoint.deadline_s; silence is still found after learner.batch_deadline_s."""
    made = service(checkpoint__deadline_s=1800, rollout__wait_for_servers_s=1e6)
    for now in range(100, 1600, 100):
        made.handle("l", m.Heartbeat(), float(now))
        made.tick(float(now))
    assert made.peers.get("l") is not None and made.ended is None
    made.tick(1500.0 + made.config.learner.batch_deadline_s + 1)
    assert made.peers.get("l") is None and made.counters["learner_ranks_lost"] == 1
    made.tick(1500.0 + made.config.learner.batch_deadline_s + 302)
    assert made.failed and "SLIP-RUN-04" in made.ended, "no other comes in its place"


def test_a_second_learner_takes_the_place_of_the_first_one():
    made = service()
    learner(made, "l2", digest="d0")
    assert sent(made, "l2", m.Welcome)[-1].incarnation == made.incarnation == 2
    assert made.peers.get("l") is None, "the process that it has replaced"
    assert sent(made, "a", m.Welcome)[-1].incarnation == 2
    made.handle("l", m.Committed(step=1, digest="x"), 1.0)
    assert sent(made, "l", m.Refused)[-1].code == "hello"
    learner(made, "l", incarnation=1)
    assert "number 2 has taken its place" in sent(made, "l", m.Refused)[-1].reason
    learner(made, "l", incarnation=0)
    assert "number 2 has taken its place" in sent(made, "l", m.Refused)[-1].reason


def test_a_learner_whose_versions_nobody_knows_is_refused():
    made = service()
    make_step(made, 1)
    learner(made, "l2", version=3)
    assert "the journal ends at version 1" in sent(made, "l2", m.Refused)[-1].reason
    made.buffer.line.forget(1)
    learner(made, "l3", version=0)
    assert "the journal begins after step" in sent(made, "l3", m.Refused)[-1].reason
    assert made.incarnation == 1
    fresh = bare_service()
    learner(fresh, "l", version=1, cursor={"x": 1})
    assert "cursor cannot be used" in sent(fresh, "l", m.Refused)[-1].reason


def test_silence_is_not_held_against_peers_when_replay_itself_was_away():
    made = service()
    made.tick(60.0, late=True)
    assert made.peers.get("a") is not None


def test_a_server_that_gets_an_evaluated_version_late_is_told_to_drop_it():
    made = service()
    made.evaluations.board.closed[4] = ""
    made.handle("a", m.LeaseRequest(capacity=1, version=4), 1.0)
    assert sent(made, "a", m.EvaluationClosed)[-1].version == 4


def test_a_corrupt_message_is_counted_and_costs_an_admitted_peer_nothing():
    made = service()
    made.corrupt("a", WireError("header is not msgpack"))
    made.corrupt("stranger", WireError("schema version 0"))
    assert made.counters["corrupt_messages"] == 2
    assert made.peers.get("a") is not None and not sent(made, "a", m.Refused)
    assert "schema version 0" in sent(made, "stranger", m.Refused)[-1].reason


def test_tokens_older_than_the_lease_allows_are_rejected_under_wait():
    made = service()
    make_step(made, 1)
    *_, newest = lease(made, version=1, capacity=9)
    assert newest.min_version == 1
    made.handle("a", group_message(newest, [0, 1]), 1.0)
    ack = sent(made, "a", m.Ack)[-1]
    assert ack.status == "rejected" and "this lease needs 1 or newer" in ack.reason


def test_a_server_of_an_earlier_learner_is_told_of_the_present_one_until_it_has_its_weights():
    made = service()
    learner(made, "l2", digest="d0", bus_address="tcp://new")
    made.outbox.clear()
    made.handle("a", m.Heartbeat(), 1.0)
    assert sent(made, "a", m.Welcome)[-1].bus_address == "tcp://new"
    made.handle("a", m.LeaseRequest(capacity=0, version=0, incarnation=2), 1.0)
    made.handle("a", m.Heartbeat(), 2.0)
    assert not sent(made, "a", m.Welcome)


def test_only_a_server_that_was_asked_evaluates():
    made = service(evaluated=1)
    made.handle("l", m.Evaluate(version=0), 0.0)
    made.handle("a", m.LeaseRequest(capacity=0, version=0), 0.0)
    assert sent(made, "a", m.EvaluationLease)
    made.handle("b", answering(made, make_result(0)), 1.0)
    assert not sent(made, "l", m.EvaluationResult)
    made.handle("a", answering(made, make_result(0)), 1.0)
    assert sent(made, "l", m.EvaluationResult)


def test_a_learner_hears_of_an_evaluation_once_it_has_made_that_version():
    made = service(evaluated=1)
    make_step(made, 1)
    made.handle("l", m.Evaluate(version=1), 0.0)
    made.handle("a", m.LeaseRequest(capacity=0, version=1, incarnation=1), 0.0)
    learner(made, "l2", version=0)
    made.handle("a", answering(made, make_result(1)), 1.0)
    assert not sent(made, "l2", m.EvaluationResult) and not sent(made, "l2", m.EvaluationClosed)
    trains(made, "l2", 1, "d1")
    assert sent(made, "l2", m.EvaluationResult) and sent(made, "l2", m.EvaluationClosed)
