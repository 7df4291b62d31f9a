"""The replay protocol under random schedules, deaths, duplicates and a simulated clock."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_run import SimulatedRun, config, group_message, rows

from replay import messages as m
from replay.evaluations import EvaluationBoard
from replay.leases import SlotState
from replay.prompts import PromptSource
from replay.service import Service


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), lag=st.integers(0, 4), on_stale=st.sampled_from(["wait", "mask", "drop"]))
def test_a_run_keeps_its_invariants(seed, lag, on_stale):
    run = SimulatedRun(config(replay__async_lag=lag, replay__on_stale=on_stale, replay__max_attempts=50), seed)
    for _ in range(400):
        run.step()
    assert run.max_in_flight <= (lag + 1) * 4, "admission bound"
    assert run.max_lag_trained <= lag, "no token is trained above the lag bound"
    assert len(run.trained) == len(set(run.trained)), "no group is trained twice"
    dropped = sum(n for key, n in run.service.counters.items() if key.startswith("dropped/"))
    in_flight = len(run.service.buffer.slots)
    assert len(run.admitted) <= len(run.trained) + dropped + in_flight, "nothing is lost"
    if on_stale == "wait":
        assert dropped == 0
        assert run.trained == run.admitted[: len(run.trained)], "batches are the oldest admitted groups, in order"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_poison_prompts_are_dropped_once_and_the_run_goes_on(seed):
    run = SimulatedRun(config(replay__max_attempts=1), seed)
    for _ in range(300):
        run.step()
    counters = run.service.counters
    released = sum(n for key, n in counters.items() if key.startswith("leases_released/"))
    assert counters["dropped/poison"] == released
    assert len(run.trained) == len(set(run.trained))


def service(**overrides):
    cfg = config(placement__split="1:1", **overrides)
    made = Service(cfg, PromptSource(rows(40), shuffle=False, seed=0), [], 0.0)
    made.handle("l", m.Hello(role="learner", name="learner-0", pid=1, host="h"), 0.0)
    made.handle("a", m.Hello(role="rollout_server", name="rollout-a", pid=2, host="h"), 0.0)
    made.handle("b", m.Hello(role="rollout_server", name="rollout-b", pid=3, host="h"), 0.0)
    return made


def sent(made, identity, kind):
    found = [x for who, x in made.outbox if who == identity and isinstance(x, kind)]
    made.outbox = [(who, x) for who, x in made.outbox if not (who == identity and isinstance(x, kind))]
    return found


def test_an_expired_lease_goes_to_another_server_and_the_first_result_wins():
    made = service()
    made.handle("a", m.LeaseRequest(capacity=1, version=0), 0.0)
    (first,) = sent(made, "a", m.Lease)
    made.handle("b", m.LeaseRequest(capacity=1, version=0), 0.0)
    sent(made, "b", m.Lease)
    made.handle("a", m.LeaseRequest(capacity=0, version=0), 0.0)
    made.handle("b", m.LeaseRequest(capacity=2, version=0), 10.5)
    made.handle("b", m.Heartbeat(), 10.5)
    made.handle("a", m.Heartbeat(), 10.5)
    made.tick(10.6)
    again = [x for x in sent(made, "b", m.Lease) if (x.pass_, x.index) == (first.pass_, first.index)]
    assert [x.attempt for x in again] == [2]
    made.handle("a", group_message(first, [0, 0]), 11.0)
    assert sent(made, "a", m.Ack)[-1].status == "accepted"
    assert sent(made, "b", m.Cancel)[-1].reason == "another server was first"
    made.handle("b", group_message(again[0], [0, 0]), 11.5)
    assert sent(made, "b", m.Ack)[-1].status == "superseded"


def test_a_group_that_is_sent_twice_is_acked_twice_and_kept_once():
    made = service()
    made.handle("a", m.LeaseRequest(capacity=1, version=0), 0.0)
    (lease,) = sent(made, "a", m.Lease)
    for _ in range(2):
        made.handle("a", group_message(lease, [0]), 1.0)
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
        ({"lengths": np.array([2], dtype=np.int32)}, "a group has 2"),
        ({"attempt": 9}, "never leased"),
    ],
)
def test_a_group_that_cannot_be_true_is_rejected_by_name(change, message):
    import dataclasses

    made = service()
    made.handle("a", m.LeaseRequest(capacity=1, version=0), 0.0)
    (lease,) = sent(made, "a", m.Lease)
    made.handle("a", dataclasses.replace(group_message(lease, [0]), **change), 1.0)
    ack = sent(made, "a", m.Ack)[-1]
    assert ack.status == "rejected" and message in ack.reason
    assert made.buffer.count(SlotState.BUFFERED) == 0


def test_ranks_proceed_only_when_all_hold_their_part():
    made = service(replay__async_lag=0)
    made.config = config(replay__async_lag=0)
    made.batch_desk.config = made.config
    made.handle("l1", m.Hello(role="learner", name="learner-1", pid=1, host="h", rank=1), 0.0)
    made.handle("a", m.LeaseRequest(capacity=9, version=0), 0.0)
    for lease in sent(made, "a", m.Lease):
        made.handle("a", group_message(lease, [0]), 1.0)
    made.handle("l", m.Take(step=1, rank=0), 1.0)
    assert not sent(made, "l", m.Batch), "a batch goes out when all ranks have asked"
    made.handle("l1", m.Take(step=1, rank=1), 1.0)
    assert sent(made, "l", m.Batch) and sent(made, "l1", m.Batch)
    made.handle("l", m.Take(step=1, rank=0, have=True), 1.0)
    assert not sent(made, "l", m.Proceed)
    made.handle("l1", m.Take(step=1, rank=1, have=True), 1.0)
    assert sent(made, "l", m.Proceed) and sent(made, "l1", m.Proceed)


def test_silent_servers_lose_their_leases_and_must_say_hello_again():
    made = service()
    made.handle("a", m.LeaseRequest(capacity=2, version=0), 0.0)
    assert len(sent(made, "a", m.Lease)) == 2
    made.handle("b", m.Heartbeat(), 10.0)
    made.tick(10.5)
    assert made.peers.get("a") is None and made.counters["servers_lost"] == 1
    assert made.buffer.count(SlotState.QUEUED) == 2
    made.handle("a", m.Heartbeat(), 11.0)
    assert "say Hello first" in sent(made, "a", m.Refused)[-1].reason


def test_a_run_without_any_server_ends_with_a_reason():
    made = service(rollout__wait_for_servers_s=5)
    made.lost("a", "closed", 1.0)
    made.lost("b", "closed", 1.0)
    made.tick(1.0)
    made.tick(3.0)
    assert made.ended is None
    made.tick(8.0)
    assert made.failed and "no rollout server for 5 s" in made.ended
    assert sent(made, "l", m.Goodbye)[-1].failed


def test_reward_errors_past_their_limit_end_the_run():
    made = service(replay__max_attempts=100)
    made.handle("a", m.LeaseRequest(capacity=1, version=0), 0.0)
    for _ in range(8):
        (lease,) = sent(made, "a", m.Lease)
        cancel = {"pass_": lease.pass_, "index": lease.index, "attempt": lease.attempt}
        made.handle("a", m.Cancel(**cancel, reason="reward_error", detail="KeyError: 'answer'"), 1.0)
        if made.ended:
            break
    assert made.failed and "KeyError: 'answer'" in made.ended


def test_peers_that_disagree_are_refused_by_name():
    made = service()
    made.peers.expected = {"tokenizer": "aaa"}
    other = m.Hello(role="rollout_server", name="rollout-c", pid=9, host="h", fingerprint={"tokenizer": "bbb"})
    made.handle("c", other, 1.0)
    reason = sent(made, "c", m.Refused)[-1].reason
    assert "tokenizer differs" in reason and "'rollout-c' has bbb" in reason and "this run has aaa" in reason
    assert made.peers.get("c") is None


def test_the_cursor_restores_data_and_leases_lost_prompts_again():
    made = service()
    made.handle("a", m.LeaseRequest(capacity=8, version=0), 0.0)
    leases = sent(made, "a", m.Lease)
    for lease in leases:
        made.handle("a", group_message(lease, [0]), 1.0)
    made.handle("l", m.Take(step=1, rank=0), 1.0)
    made.handle("l", m.Committed(step=1, digest="d"), 1.0)
    made.handle("l", m.CursorRequest(step=1), 1.0)
    (cursor,) = sent(made, "l", m.Cursor)

    resumed = Service(config(placement__split="1:1"), PromptSource(rows(40), shuffle=False, seed=0), [], 0.0)
    hello = m.Hello(role="learner", name="learner-0", pid=1, host="h", version=1, cursor=cursor.state)
    resumed.handle("l", hello, 0.0)
    assert (resumed.incarnation, resumed.buffer.version) == (2, 1)
    assert resumed.counters["resume_without_journal"] == 4
    resumed.handle("a", m.Hello(role="rollout_server", name="rollout-a", pid=2, host="h"), 0.0)
    resumed.handle("a", m.LeaseRequest(capacity=8, version=1), 0.0)
    again = [(x.pass_, x.index) for x in sent(resumed, "a", m.Lease)]
    assert again == [(x.pass_, x.index) for x in leases[4:]] + [(0, 8), (0, 9), (0, 10), (0, 11)], again


def test_evaluations_run_at_one_server_and_move_when_it_dies():
    made = service(data__eval="x", evaluation__num_prompts=3)
    made.evaluation_rows = rows(3)
    made.evaluations.modes = [True, False]
    made.handle("l", m.Evaluate(version=0), 0.0)
    made.handle("a", m.LeaseRequest(capacity=0, version=0), 0.0)
    made.handle("b", m.LeaseRequest(capacity=0, version=0), 0.0)
    assert [x.greedy for x in sent(made, "a", m.EvaluationLease)] == [True, False]
    assert not sent(made, "b", m.EvaluationLease)

    def result(greedy):
        return m.EvaluationResult(
            version=0,
            greedy=greedy,
            seconds=1.0,
            texts=["a"] * 3,
            finish_reasons=["stop"] * 3,
            rewards=np.ones(3, dtype=np.float32),
            lengths=np.ones(3, dtype=np.int32),
        )

    made.handle("a", result(True), 1.0)
    made.lost("a", "closed", 1.0)
    assert [x.greedy for x in sent(made, "b", m.EvaluationLease)] == [False]
    made.handle("b", result(False), 2.0)
    assert len(sent(made, "l", m.EvaluationResult)) == 2
    assert sent(made, "b", m.EvaluationClosed)[-1].version == 0


def test_an_evaluation_that_fails_everywhere_is_given_up():
    board = EvaluationBoard([True], 100.0)
    board.request(0, 0.0)
    for server in ("a", "b"):
        board.holds(server, 0)
    asked = []
    while board.open:
        ((server, _),) = board.assign()
        asked.append(server)
        board.failed(server, 0)
    assert asked == ["a", "b", "a", "b"] and "every server" in board.closed[0]


def test_overdue_evaluations_are_closed_with_a_reason():
    made = service(evaluation__deadline_s=5)
    made.evaluations.modes = [True]
    made.handle("l", m.Evaluate(version=4), 0.0)
    made.handle("b", m.Heartbeat(), 6.0)
    made.handle("a", m.Heartbeat(), 6.0)
    made.tick(6.0)
    assert "no server holds that version" in sent(made, "l", m.EvaluationClosed)[-1].reason


def test_renewals_without_progress_end_the_lease():
    made = service()
    made.handle("a", m.LeaseRequest(capacity=1, version=0), 0.0)
    (lease,) = sent(made, "a", m.Lease)
    now = 0.0
    while made.buffer.count(SlotState.LEASED) and now < 100:
        now += 1.0
        made.handle("a", m.Renew(leases=[[lease.pass_, lease.index, lease.attempt, 3]]), now)
        made.handle("a", m.LeaseRequest(capacity=0, version=0), now)
        made.tick(now)
    assert 15 < now <= 22, "lease_s is 10: one lease of grace for waiting and scoring"
    assert sent(made, "a", m.Cancel)[-1].reason == "lease expired"


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
    assert made.batch_desk.takes == {} and made.batch_desk.haves == {}


def test_a_learner_rank_that_is_gone_ends_the_run_after_its_time_to_come_back():
    made = service()
    made.unreachable("l", 1.0)
    made.handle("a", m.Heartbeat(), 5.0)
    made.tick(5.0)
    made.handle("l", m.Heartbeat(), 6.0)
    made.handle("a", m.Heartbeat(), 15.0)
    made.tick(15.0)
    assert made.ended is None, "it came back"
    made.unreachable("l", 16.0)
    made.handle("a", m.Heartbeat(), 27.0)
    made.tick(27.0)
    assert made.failed and "'learner-0'" in made.ended and "[closed]" in made.ended


def test_a_second_learner_is_refused_and_a_broken_cursor_too():
    made = service()
    made.handle("l2", m.Hello(role="learner", name="learner-0", pid=9, host="h"), 1.0)
    assert "served a learner before" in sent(made, "l2", m.Refused)[-1].reason
    fresh = Service(config(placement__split="1:1"), PromptSource(rows(9), shuffle=False, seed=0), [], 0.0)
    fresh.handle("l", m.Hello(role="learner", name="learner-0", pid=9, host="h", cursor={"x": 1}), 1.0)
    assert "cursor cannot be used" in sent(fresh, "l", m.Refused)[-1].reason


def test_silence_is_not_held_against_peers_when_replay_itself_was_away():
    made = service()
    made.tick(60.0, late=True)
    assert made.peers.get("a") is not None


def test_a_server_that_gets_an_evaluated_version_late_is_told_to_drop_it():
    made = service()
    made.evaluations.closed[4] = ""
    made.handle("a", m.LeaseRequest(capacity=1, version=4), 1.0)
    assert sent(made, "a", m.EvaluationClosed)[-1].version == 4


def test_token_ids_beyond_the_vocabulary_are_rejected():
    made = service()
    made.desk.vocab_size = 5
    made.handle("a", m.LeaseRequest(capacity=1, version=0), 0.0)
    (lease,) = sent(made, "a", m.Lease)
    made.handle("a", group_message(lease, [0]), 1.0)
    assert "token id 5 of a vocabulary of 5" in sent(made, "a", m.Ack)[-1].reason


def test_a_corrupt_message_is_counted_and_costs_an_admitted_peer_nothing():
    made = service()
    made.corrupt("a", "header is not msgpack")
    made.corrupt("stranger", "schema version 0")
    assert made.counters["corrupt_messages"] == 2
    assert made.peers.get("a") is not None and not sent(made, "a", m.Refused)
    assert "schema version 0" in sent(made, "stranger", m.Refused)[-1].reason
