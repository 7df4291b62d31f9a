"""How leases end: given back, expired, dropped, and what the run and its peers are told of that."""

import numpy as np
import pytest

from replay import messages as m
from replay.channel import Inventory
from replay.state.leases import WAIT_FOR_OTHERS_S, Shares, Slot, SlotState
from tests.replay.simulated_run import (
    answering,
    finishes,
    gives_back,
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


def test_an_expired_lease_goes_to_another_server_and_the_first_result_wins():
    made = service()
    (first,) = lease(made)
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


def test_the_oldest_token_of_a_group_is_looked_for_once():
    """Ranks that wait have it asked of every group at each turn."""
    looked = []

    class Looked:
        loss_mask = np.array([0, 1, 1], np.uint8)

        def __init__(self, versions):
            self._versions = np.array(versions, np.int32)

        @property
        def versions(self):
            looked.append(self)
            return self._versions

    slot = Slot((0, 0), {}, 0)
    for group, oldest in ((Looked([1, 5, 4]), 4.0), (Looked([1, 7, 9]), 7.0)):
        slot.group = group
        assert [slot.oldest_sampled() for _ in range(3)] == [oldest] * 3
    assert len(looked) == 2


SCORED = {"of": "policy", "context": "{prompt}!", "wait_s": 40.0, "retries": 2, "timeout_s": 10.0}


@pytest.mark.parametrize(("on_error", "quiet_s"), [(None, 10), ("wait", 40), ("leave_out", 30)])
def test_renewals_without_progress_end_the_lease(on_error, quiet_s):
    """A group that waits for scores of a teacher may do so for as long as its server waits."""
    taught = {"algorithm__distillation": "sampled", "teachers": {"own": {**SCORED, "on_error": on_error}}}
    made = service(**(taught if on_error else {}))
    (given,) = lease(made)
    now = 0.0
    while made.buffer.count(SlotState.LEASED) and now < 100:
        now += 1.0
        made.handle("a", m.Renew(leases=[[given.pass_, given.index, given.attempt, 3]]), now)
        made.handle("a", m.LeaseRequest(capacity=0, version=0), now)
        made.tick(now)
    assert quiet_s + 5 < now <= quiet_s + 12, "lease_s is 10: one lease of grace for waiting and scoring"
    assert sent(made, "a", m.Cancel)[-1].reason == "lease expired"


def renewals(made, given, until, *, queued, sampled):
    """Server 'a' renews leases every second; `sampled(now)` are the tokens of its engine. When each one ended."""
    ended = {}
    for now in range(1, until):
        renew = [[each.pass_, each.index, each.attempt, 0 if at in queued else sampled(now)] for at, each in given]
        made.handle("a", m.Renew(leases=renew, queued=queued, sampled=sampled(now)), float(now))
        made.handle("a", m.LeaseRequest(capacity=0, version=0), float(now))
        made.tick(float(now))
        for cancel in sent(made, "a", m.Cancel):
            ended.setdefault(cancel.index, now)
    return ended


def test_a_lease_that_waits_its_turn_at_a_busy_server_does_not_end():
    made = service()
    given = list(enumerate(lease(made, capacity=3)))
    assert renewals(made, given, 100, queued=[1, 2], sampled=lambda now: now) == {}
    assert made.counters["leases_released/expired"] == 0


def test_a_server_whose_leases_wait_for_ever_is_named(caplog):
    made = service()
    given = list(enumerate(lease(made, capacity=2)))
    ended = renewals(made, given, 60, queued=[1], sampled=lambda now: min(now, 20))
    assert sorted(ended) == [given[0][1].index, given[1][1].index]
    assert all(35 < now <= 42 for now in ended.values()), "20 + twice lease_s: the engine has stood still since"
    assert "expired: not renewed for 10 s by 'rollout-a'" in caplog.text


def test_a_lease_that_later_ones_overtake_is_not_waiting():
    made = service()
    given = list(enumerate(lease(made, capacity=2)))
    ended = renewals(made, given, 60, queued=[0], sampled=lambda now: now)
    assert list(ended) == [given[0][1].index] and 15 < ended[given[0][1].index] <= 22


@pytest.mark.parametrize("others", [False, True])
def test_leases_wait_behind_an_evaluation_unless_another_server_has_room(others):
    made = service(evaluated=2, evaluation__deadline_s=1000.0, network__silent_after_s=1000.0)
    given = list(enumerate(lease(made, capacity=2)))
    made.handle("l", m.Evaluate(version=0), 0.0)
    assert sent(made, "a", m.EvaluationLease)
    if others:
        lease(made, "b")
    ended = renewals(made, given, 100, queued=[0, 1], sampled=lambda now: now)
    assert sorted(ended) == ([each.index for _, each in given] if others else [])


def test_a_prompt_is_poison_once_its_attempts_are_used_up():
    made = service(replay__max_attempts=2)
    for attempt in (1, 2):
        given = next(x for x in lease(made) if x.index == 0)
        assert given.attempt == attempt
        gives_back(made, given, "engine_error")
    assert made.counters["dropped/poison"] == 1 and (0, 0) not in made.buffer.slots
    assert made.counters["leases_released/engine_error"] == 2


def test_deaths_of_servers_and_expired_leases_do_not_make_a_prompt_poison():
    made = service(replay__max_attempts=2)
    for end in range(19):
        given = next(x for x in lease(made, "b", now=100.0 * end) if x.index == 0)
        assert given.attempt == end + 1
        if end % 2:
            made.leasing.expire(100.0 * end + 50.0)
        else:
            made.lost("b", "closed", 100.0 * end)
            joins(made, "b", 100.0 * end)
    assert not [name for name in made.counters if name.startswith("dropped/")]
    lease(made, "b", now=5000.0)
    made.leasing.expire(6000.0)
    assert made.counters["dropped/interrupted"] == 1 and (0, 0) not in made.buffer.slots, "nothing cycles for ever"


def test_only_who_holds_a_lease_renews_it():
    made = service()
    (given,) = lease(made)
    for server, attempt in (("b", 1), ("a", 2)):
        made.handle(server, m.Renew(leases=[[0, given.index, attempt, 5]]), 9.0)
        assert sent(made, server, m.Cancel)[-1].reason == "this lease is no longer held"
    assert made.counters["renewals_refused"] == 2
    assert made.buffer.slots[0, given.index].deadline == 10.0
    made.handle("a", m.Renew(leases=[[0, given.index, 1, 5]]), 9.0)
    assert made.buffer.slots[0, given.index].deadline == 19.0


def gives_up(made, count, reason="prompt_not_rendered"):
    """Server 'a' cannot do anything with the next prompts."""
    for number in range(count):
        for given in lease(made):
            gives_back(made, given, reason, f"no template, {number}")
            if made.ended:
                return


def test_a_pass_that_gives_no_group_ends_the_run_with_the_counts_and_the_last_reason():
    made = service(num_rows=12)
    gives_up(made, 11)
    assert made.ended is None
    gives_up(made, 5, "prompt_too_long")
    assert made.failed and "12 prompts in a row, a whole pass over the data, were dropped" in made.ended
    assert "11 prompt_not_rendered, 1 prompt_too_long" in made.ended and "prompt_too_long: no template, 0" in made.ended


def test_one_group_of_a_pass_is_enough_to_go_on():
    made = service(num_rows=12)
    gives_up(made, 11)
    finishes(made, 1, [0])
    gives_up(made, 11)
    assert made.ended is None and made.counters["dropped/prompt_not_rendered"] == 22


def test_what_is_dropped_without_end_is_not_logged_without_end(caplog):
    made = service(num_rows=1000)
    gives_up(made, 350)
    lines = [record.getMessage() for record in caplog.records if "gave up group" in record.getMessage()]
    assert len(lines) == 102 and lines[-1].endswith("(no. 300)")


def test_status_says_why_no_batch_can_be_formed():
    made = service()
    gives_up(made, 3)
    make_step(made, 1)
    learner(made, "l2", version=0)
    trains(made, "l2", 1, "other")
    made.handle("a", m.LeaseRequest(capacity=4, version=1, incarnation=1), 0.0)
    trains(made, "l2", 2, "d2")
    made.handle("l2", m.Take(step=3, rank=0), 0.0)
    made.handle("x", m.StatusRequest(), 1.0)
    (found,) = [wait["for"] for wait in sent(made, "x", m.Status)[-1].state["waits"] if wait["code"] == "batch"]
    replaced = "'rollout-a' has no lease: it serves version 1 of incarnation 1, which incarnation 2 has replaced"
    for part in ("batch 3: it has ", "3 prompt_not_rendered", "prompt_not_rendered: no template, 2", replaced):
        assert part in found


def test_a_filter_of_a_user_drops_groups_and_one_that_fails_ends_the_run(tmp_path):
    (tmp_path / "own.py").write_text(
        "def keep(group, *, least: int = 3):\n    return len(group.rewards) >= least\n"
        "def fails(group):\n    return group.nothing\ndef vague(group):\n    return 1\n"
    )
    made = service(algorithm__dynamic_sampling=f"{tmp_path}/own.py:keep")
    finishes(made, 1, [0])
    assert made.counters["dropped/filtered"] == made.run.flat_drops == 1
    for name, said in {"fails": "own.py:4; correct the filter", "vague": "gave 1; return true"}.items():
        made = service(algorithm__dynamic_sampling=f"{tmp_path}/own.py:{name}")
        finishes(made, 1, [0])
        (goodbye,) = sent(made, "a", m.Goodbye)
        assert f"own.py:{name}', group 0/" in goodbye.reason and said in goodbye.reason


def test_dynamic_sampling_drops_flat_groups_up_to_a_bound_for_each_step():
    made = service(algorithm__dynamic_sampling=True, algorithm__max_flat_drops=0.5)
    finishes(made, 4, [0], reward=0.0)
    assert made.counters["dropped/flat_rewards"] == 2 and made.counters["flat_groups_kept"] == 2
    assert made.buffer.count(SlotState.BUFFERED) == 2
    finishes(made, 4, [0])
    made.handle("l", m.Take(step=1, rank=0), 1.0)
    assert sent(made, "l", m.Batch) and made.run.flat_drops == 0


def test_the_first_that_has_a_version_gets_its_part_until_the_others_have_had_their_time():
    shares = Shares()
    assert shares.most([3, 3, 3, 3], needed=4, work=64, now=10.0) == 64, "nobody can take it anyway"
    assert shares.most([4, 3, 3, 3], needed=4, work=64, now=11.0) == 16
    assert shares.most([4, 4, 3, 3], needed=4, work=65, now=11.0 + WAIT_FOR_OTHERS_S) == 17, "rounded up"
    assert shares.most([4, 4, 3, 3], needed=4, work=64, now=11.1 + WAIT_FOR_OTHERS_S) == 64, "one of them is slow"
    assert shares.most([5, 4, 4, 3], needed=5, work=64, now=20.0) == 16, "the next version, the next wait"
    assert shares.most([5, 5, 5, 5], needed=5, work=64, now=20.1) == 64, "all have it"


@pytest.mark.parametrize("versions", [[], [7]])
def test_one_server_or_none_waits_for_nobody(versions):
    assert Shares().most(versions, needed=7, work=64, now=0.0) == 64


def says(made, server, now, *, leases=(), finished=(), evaluations=()):
    """One beat's inventory of a server, and what replay thinks of it at its next tick."""
    held = {"leases": [[*key, 0] for key in leases], "finished": list(finished), "evaluations": list(evaluations)}
    made.handle(server, m.Renew(**held), now)
    made.tick(now)


def test_a_lease_that_two_inventories_lack_is_sent_again():
    made = service(replay__lease_s=120)
    first, second = lease(made, capacity=2)
    keys = [[each.pass_, each.index, each.attempt] for each in (first, second)]
    says(made, "a", 1.0, leases=keys[1:])  # may have crossed it
    says(made, "a", 3.0, leases=keys[1:])
    assert not sent(made, "a", m.Lease)
    says(made, "a", 5.0, leases=keys[1:])
    assert [again.index for again in sent(made, "a", m.Lease)] == [first.index] and made.counters["leases_resent"] == 1
    says(made, "a", 7.0, leases=keys)
    says(made, "a", 9.0, finished=keys)
    says(made, "a", 11.0, finished=keys)
    assert not sent(made, "a", m.Lease), "what is finished is not missing"


def test_words_without_a_key_count_in_a_row_and_from_its_last_sending_on():
    inventory = Inventory[int]()

    def lacks(*held: int) -> bool:
        inventory.heard(held)
        return inventory.lacks(1)

    assert [lacks(), lacks(1), lacks(), lacks()] == [False] * 4, "the second was a word with it"
    assert [lacks(), lacks(), lacks(), lacks()] == [True, False, True, False], "sent again, and lacking again"
    for _ in range(4):
        inventory.heard([])
    assert not lacks(), "it was no question meanwhile"


def test_a_finished_group_that_did_not_come_is_asked_for_and_one_that_did_is_acknowledged_again():
    made = service()
    here, lost = lease(made, capacity=2)
    made.handle("a", group_message(here, [0, 0]), 1.0)
    assert [ack.status for ack in sent(made, "a", m.Ack)] == ["accepted"]
    says(made, "a", 2.0, finished=[[g.pass_, g.index, g.attempt] for g in (here, lost)])
    said = {(ack.index, ack.status) for ack in sent(made, "a", m.Ack)}
    assert said == {(here.index, "accepted"), (lost.index, "missing")}
    assert made.counters["duplicate_groups"] == 0, "its payload did not travel"


def test_parts_of_evaluations_are_asked_for_again_where_they_or_their_results_were_lost():
    made = service(evaluated=2)
    made.handle("l", m.Evaluate(version=0), 0.0)
    lease(made)
    (asked,) = sent(made, "a", m.EvaluationLease)
    part = [asked.version, asked.set, asked.greedy, asked.first]
    for now in (1.0, 3.0, 5.0):
        assert not sent(made, "a", m.EvaluationLease)
        says(made, "a", now)
    assert sent(made, "a", m.EvaluationLease) == [asked]
    says(made, "a", 6.0, evaluations=[[*part, False]])
    assert not sent(made, "a", m.EvaluationLease)
    says(made, "a", 7.0, evaluations=[[*part, True]])
    assert sent(made, "a", m.EvaluationLease) == [asked], "the result was lost"
    made.handle("a", answering(made, make_result(0, n=2)), 8.0)
    sent(made, "a", m.EvaluationClosed)
    says(made, "a", 9.0, evaluations=[[*part, True]])
    assert [closed.version for closed in sent(made, "a", m.EvaluationClosed)] == [0]
