"""Replay restarted from its journal: what it had decided stands, what it told nobody of never happened."""

import asyncio
import time
from collections import Counter

import pytest

from learner import dialog
from learner.batches import BatchReader
from learner.rows import check, lags_of
from replay import messages as m
from replay.channel import AsyncRouter
from replay.journal import JournalError, JournalReadOnly
from replay.main import open_journal
from replay.outlet import SLOW_DISK_S
from replay.player import whole_line
from replay.serve import keep_company
from replay.state.apply import boot_fields
from replay.state.leases import SlotState
from tests.replay.simulated_run import (
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
from tests.replay.simulation.journal import SimulatedJournal
from tests.replay.simulation.world import comparable


def restarted(made, *, records=None, now=100.0, num_rows=40, **overrides):
    """Another service, from what the journal of the first one has."""
    journal = made.journal.crash(None)
    if records is not None:
        journal.records = journal.records[:records]
        journal.flushed = min(journal.flushed, records)
    again = bare_service(journal, num_rows, **overrides)
    again.restore(list(journal.records[journal.newest_snapshot() :]), now)
    return again


def same(made, again):
    """Whether one is as good as the other."""
    found, wanted = comparable(again), comparable(made)
    return {key: (found[key], wanted[key]) for key in wanted if found[key] != wanted[key]} == {}


def busy(**overrides):
    """A service with two steps made, one batch out, groups here, leases running, and some that have failed."""
    made = service(**overrides)
    made.journal.append("boot", boot_fields(made.config, made.run.source.state(), 1))
    for step in (1, 2):
        make_step(made, step, versions=[step - 1])
    running = lease(made, version=2, capacity=3)
    made.handle("a", group_message(running[0], [2]), 1.0)
    made.handle("a", m.Cancel(pass_=0, index=running[1].index, attempt=1, reason="engine_error"), 1.0)
    made.handle("l", m.Take(step=3, rank=0), 1.0)
    assert sent(made, "l", m.Batch)
    return made


def test_a_restart_gives_back_the_whole_state():
    made = busy()
    again = restarted(made)
    assert same(made, again)
    assert again.buffer.in_flight == made.buffer.in_flight > 4
    made.handle("l", m.Committed(step=3, digest="d3"), 1.0)
    made.handle("l", m.Checkpointed(step=3, kept=[2, 3]), 1.0)
    lease(made, version=3, capacity=9)
    made.handle("b", m.LeaseRequest(capacity=2, version=3, incarnation=1), 1.0)
    assert made.journal.newest_snapshot() > 0 and same(made, restarted(made))


def test_a_lowered_lag_survives_a_restart_and_gives_way_to_another_setting():
    made = busy(replay__async_lag=2)
    made.handle("l", m.LowerLag(step=2, async_lag=1), 1.0)
    for _ in range(2):  # from the records, and from a snapshot
        again = restarted(made, replay__async_lag=2)
        assert same(made, again) and again.buffer.async_lag == 1
        assert restarted(made, replay__async_lag=3).buffer.async_lag == 3
        made.handle("l", m.Committed(step=3, digest="d3"), 1.0)
        made.handle("l", m.Checkpointed(step=3, kept=[3]), 1.0)


def repeats(again, name, steps):
    """A learner of lag 1 starts before these steps and makes them; the highest lag of a token that each trains."""
    version = steps[0] - 1
    learner(again, name, version=version, digest=f"d{version}", now=100.0)
    oldest = []
    for step in steps:
        again.handle(name, m.Take(step=step, rank=0), 100.0)
        (batch,) = sent(again, name, m.Batch)
        check(batch, async_lag=1, vocab_size=1 << 20)
        oldest.append(int(lags_of(batch).max()))
        again.handle(name, m.Committed(step=step, digest=f"d{step}"), 100.0)
    return oldest


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_groups_keep_the_bound_of_the_lag_that_they_were_admitted_under(from_snapshot):
    made = service(replay__async_lag=3)
    finishes(made, 16, [0])
    for step in (1, 2, 3):
        trains(made, "l", step, f"d{step}")
        if from_snapshot and step == 1:
            made.handle("l", m.Checkpointed(step=1, kept=[1]), 1.0)
    assert (made.journal.newest_snapshot() > 0) == from_snapshot
    again = restarted(made, replay__async_lag=1)
    assert repeats(again, "l2", (2, 3, 4)) == [1, 2, 3], "the last was in no batch yet"
    assert not again.counters["stale_leased_again"]
    once_more = restarted(again, replay__async_lag=1)
    assert repeats(once_more, "l3", (3, 4)) == [2, 3]
    joins(once_more, "a", 101.0)
    (admitted, *_) = lease(once_more, version=4, incarnation=3, capacity=9, now=101.0)
    assert once_more.buffer.slots[0, admitted.index].async_lag == 1


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_a_repeated_batch_leaves_out_the_tokens_that_were_masked_in_it(from_snapshot):
    made = service(replay__on_stale="mask")
    late, *others = lease(made, capacity=8)
    for each in others:
        made.handle("a", group_message(each, [0]), 1.0)
    for step in (1, 2, 3):
        made.handle("l", m.Take(step=step, rank=0), 1.0)
        for each in lease(made, capacity=9, version=step - 1):
            made.handle("a", group_message(each, [step - 1]), 1.0)
        made.handle("l", m.Committed(step=step, digest=f"d{step}"), 1.0)
    made.handle("a", group_message(late, [0, 3]), 1.0)
    if from_snapshot:
        made.handle("l", m.Checkpointed(step=3, kept=[3]), 1.0)
    sent(made, "l", m.Batch)
    made.handle("l", m.Take(step=4, rank=0), 1.0)
    (before,) = sent(made, "l", m.Batch)
    assert made.counters["tokens_masked"] == 2
    again = restarted(restarted(made, replay__on_stale="wait"), replay__on_stale="wait")
    learner(again, "l2", version=3, digest="d3", now=100.0)
    again.handle("l2", m.Take(step=4, rank=0), 100.0)
    (batch,) = sent(again, "l2", m.Batch)
    check(batch, async_lag=1, vocab_size=1 << 20)
    assert batch.loss_mask.tolist() == before.loss_mask.tolist() and not batch.loss_mask.all()


def test_leases_go_on_at_servers_that_come_back_and_to_others_when_they_do_not():
    made = service()
    first, second = lease(made, "a")[0], lease(made, "b")[0]
    again = restarted(made)
    assert set(again.missing) == {"a", "b"}
    again.handle("a", m.Heartbeat(), 101.0)
    assert sent(again, "a", m.Refused)[-1].code == "hello"
    joins(again, "a", 101.0)
    again.handle("a", group_message(first, [0]), 102.0)
    assert sent(again, "a", m.Ack)[-1].status == "accepted"
    again.tick(109.0)
    assert again.buffer.slots[0, second.index].state is SlotState.LEASED, "it has time to come back"
    again.tick(110.5)
    assert again.buffer.slots[0, second.index].state is SlotState.QUEUED
    assert not again.missing


def test_a_server_of_the_same_name_frees_the_leases_of_the_one_before_it():
    made = service()
    hello = m.Hello(role="rollout_server", name="rollout-c", pid=4, host="h")
    made.handle("rollout-c.old", hello, 0.0)
    (given,) = lease(made, "rollout-c.old")
    again = restarted(made)
    again.handle("a", m.Hello(role="rollout_server", name="rollout-a", pid=2, host="h"), 101.0)
    again.tick(101.1)
    assert again.buffer.slots[0, given.index].state is SlotState.LEASED, "another server says nothing about it"
    again.handle("rollout-c.new", hello, 101.1)
    again.tick(101.2)
    assert again.buffer.slots[0, given.index].state is SlotState.QUEUED


def test_leases_of_a_snapshot_have_a_deadline_again():
    made = busy()
    made.handle("l", m.Committed(step=3, digest="d3"), 1.0)
    made.handle("l", m.Checkpointed(step=3, kept=[3]), 1.0)
    again = restarted(made, now=500.0)
    held = [slot for slot in again.buffer.slots.values() if slot.state is SlotState.LEASED]
    assert held and {slot.deadline for slot in held} == {510.0}
    again.leasing.expire(505.0)
    assert all(slot.state is SlotState.LEASED for slot in held)


def test_a_group_that_was_accepted_and_not_acked_is_a_duplicate_after_the_restart():
    made = service()
    (given,) = lease(made)
    made.handle("a", group_message(given, [0]), 1.0)
    again = restarted(made)
    joins(again, "a", 101.0)
    again.handle("a", group_message(given, [0]), 101.0)
    assert sent(again, "a", m.Ack)[-1].status == "accepted" and again.counters["duplicate_groups"] == 1


def test_a_learner_that_was_there_comes_back_as_the_same_incarnation():
    made = busy()
    again = restarted(made)
    learner(again, "l", incarnation=1, bus_address="tcp://bus")
    assert sent(again, "l", m.Welcome)[-1].incarnation == 1 and again.incarnation == 1
    assert again.run.bus_address == "tcp://bus"
    again.handle("l", m.Take(step=3, rank=0), 101.0)
    (batch,) = sent(again, "l", m.Batch)
    assert [tuple(g) for g in batch.group_ids] == [t.group_id for t in made.buffer.line.steps[3].groups]
    again.handle("l", m.Committed(step=3, digest="d3"), 102.0)
    assert again.buffer.version == 3


def test_a_process_whose_first_hello_was_not_answered_is_not_counted_twice():
    made = busy()
    again = restarted(made)
    learner(again, "l", incarnation=0)
    assert again.incarnation == 1


def two_ranks():
    """A service with two learner ranks, both of which hold their part of batch 1."""
    made = service(ranks=2)
    finishes(made, 9, [0])
    for rank, identity in enumerate(("l", "l1")):
        made.handle(identity, m.Take(step=1, rank=rank), 1.0)
    return made


def back(again):
    """Both ranks say Hello to a replay that was restarted."""
    again.batching.num_ranks = 2
    for rank, identity in enumerate(("l", "l1")):
        hello = m.Hello(role="learner", name=f"learner-{rank}", pid=1, host="h", rank=rank, incarnation=1)
        again.handle(identity, hello, 101.0)
    return again


def test_a_rank_whose_proceed_was_lost_follows_the_one_that_has_begun():
    made = two_ranks()
    for rank, identity in enumerate(("l", "l1")):
        made.handle(identity, m.Take(step=1, rank=rank, have=True), 1.0)
    again = back(restarted(made))
    again.handle("l1", m.Take(step=1, rank=1, have=True), 101.0)
    assert sent(again, "l1", m.Proceed), "rank 0 is in a collective and says nothing"


def test_ranks_of_the_last_learner_do_not_speak_for_the_next_one():
    made = two_ranks()
    learner(made, "l2", version=0)
    made.handle("l1", m.Take(step=1, rank=1, have=True), 2.0)
    assert sent(made, "l1", m.Refused)[-1].code == "hello"
    assert not made.batching.haves


def test_a_divergence_that_was_half_written_is_completed():
    made = busy()
    running = next(slot.group_id for slot in made.buffer.slots.values() if slot.state is SlotState.LEASED)
    learner(made, "l2", version=1, digest="d1")
    trains(made, "l2", 2, "other")
    kinds = [record.kind for record in made.journal.records]
    for count in range(kinds.index("diverged") - 1, len(kinds) + 1):
        again = restarted(made, records=count)
        if "other" in [record.fields.get("digest") for record in made.journal.records[:count]]:
            assert again.buffer.line.ahead(2) == [] and again.buffer.line.digest(2) == "other"
            assert again.run.policies.lost == [(0, 1, 2)]
            assert again.buffer.slots[running].voided >= 1


def test_nothing_leaves_while_the_disk_is_full():
    made = service()
    assert made.sayable(0.0) and made.outlet.is_empty
    made.journal.full = True
    lease(made)
    made.handle("b", m.LeaseRequest(capacity=1, version=0, incarnation=1), 1.0)
    made.handle("viewer", m.StatusRequest(), 1.0)
    kept = len(made.outbox) - 1
    assert [type(said) for _, said in made.sayable(1.0)] == [m.Status], "it promises nothing"
    assert kept > 0 and not made.outlet.is_empty and made.counters["journal_full"] == 1
    assert made.sayable(10 * made.config.learner.batch_deadline_s) == [] and made.ended is None, "it waits"
    assert made.report.of(9.0, ended=None, no_server_since=0.0)["waits"][0]["code"] == "disk"
    made.journal.full = False
    assert len(made.sayable(1e6)) == kept and made.outlet.unwritten_since is None, "and goes on"


def test_answers_leave_in_order_as_far_as_the_journal_has_come_and_the_loop_goes_on():
    made = service(replay__lease_s=60.0)
    made.sayable(0.0)
    made.journal.lazy = True
    given, numbers = lease(made, capacity=2), []
    for each in given:
        made.handle("a", group_message(each, [0]), 1.0)
        assert made.sayable(1.0) == []
        numbers.append(made.journal.submitted)
    made.handle("viewer", m.StatusRequest(), 1.0)
    assert [type(said) for _, said in made.sayable(1.0)] == [m.Status]
    for number, each in zip(numbers, given, strict=True):
        made.journal.write(number - 1)
        assert not [said for _, said in made.sayable(1.0) if isinstance(said, m.Ack)]
        made.journal.write(number)
        assert [said.index for _, said in made.sayable(1.0) if isinstance(said, m.Ack)] == [each.index]


def test_a_cursor_waits_until_the_journal_is_on_the_disk():
    made = busy()
    made.sayable(0.0)
    made.journal.lazy = True
    made.handle("l", m.Committed(step=3, digest="d3"), 1.0)
    made.handle("l", m.CursorRequest(step=3), 1.0)
    assert made.sayable(1.0) == []
    made.journal.write(made.journal.submitted)
    assert not [said for _, said in made.sayable(1.0) if isinstance(said, m.Cursor)], "a power failure may take it"
    made.journal.sync(made.journal.submitted)
    assert [type(said) for _, said in made.sayable(1.0)] == [m.Cursor] and made.outlet.is_empty


def test_a_disk_that_takes_nothing_and_says_nothing_is_named(caplog):
    made = service()
    made.sayable(0.0)
    made.journal.lazy = True
    lease(made)
    joins(made, "c", 1.0)
    assert made.sayable(1.0) == made.sayable(1.0 + SLOW_DISK_S) == []
    assert made.outlet.unwritten_since is None
    made.sayable(1.1 + SLOW_DISK_S)
    assert "nothing was written for 5 s [slow]" in caplog.text
    assert made.report.waits.of(9.0, 0.0)[0]["code"] == "disk"
    made.journal.write(made.journal.submitted)
    assert made.sayable(9.0) and made.outlet.unwritten_since is None


@pytest.mark.parametrize("was_full", [False, True])
def test_a_journal_that_has_become_read_only_ends_the_run_at_once(monkeypatch, was_full):
    made = service()
    assert made.sayable(0.0) and made.outlet.is_empty
    text = "journal/000001.seg: 7 bytes cannot be written: Read-only file system; make it writable"
    made.journal.full = True
    lease(made)
    assert not was_full or made.sayable(1.0) == []
    monkeypatch.setattr(SimulatedJournal, "problem", JournalReadOnly(text))
    made.handle("viewer", m.StatusRequest(), 1.0)
    said = made.sayable(1.0) + made.sayable(1.0)
    assert {type(each) for _, each in said} == {m.Goodbye, m.Status} and made.outlet.is_empty
    assert made.failed and made.ended.startswith("replay cannot go on: journal/000001.seg: 7 bytes cannot be written")
    assert made.ended.endswith("make it writable [SLIP-JOURNAL-04]") and made.counters["journal_full"] == was_full


def test_files_are_released_once_their_snapshot_is_appended(monkeypatch):
    made = busy(checkpoint__keep=1)
    made.handle("l", m.Committed(step=3, digest="d3"), 2.0)
    released = []
    monkeypatch.setattr(made.journal, "release", lambda first: released.append((first, made.journal.records[-1].kind)))
    made.handle("l", m.Checkpointed(step=3, kept=[2, 3]), 2.0)
    assert released == [(1, "snapshot")], "step 3 may come again, and its groups are in the first file"
    made.handle("l", m.Checkpointed(step=3, kept=[3]), 2.0)
    assert released[-1][0] == min(
        [made.journal.segment, *(s.location.segment for s in made.buffer.slots.values() if s.location)]
    )


def test_a_checkpoint_on_a_full_disk_frees_nothing_and_costs_nothing():
    made = busy()
    made.handle("l", m.Committed(step=3, digest="d3"), 2.0)
    made.journal.full = True
    made.sayable(2.0)
    made.handle("l", m.Checkpointed(step=3, kept=[3]), 2.0)
    assert made.journal.segment == 1 and made.journal.released == 0
    made.journal.full = False
    made.sayable(2.0)
    assert same(made, restarted(made))


@pytest.mark.parametrize("from_snapshot", [False, True])
def test_a_journal_of_another_dataset_or_run_is_refused(from_snapshot):
    made = busy()
    if from_snapshot:
        made.handle("l", m.Committed(step=3, digest="d3"), 2.0)
        made.handle("l", m.Checkpointed(step=3, kept=[3]), 2.0)
        assert made.journal.records[made.journal.newest_snapshot()].kind == "snapshot"
    with pytest.raises(JournalError, match=r"data\.train \(number of rows\): .* with 40, now it is 39"):
        restarted(made, num_rows=39)
    with pytest.raises(JournalError, match=r"rollout\.groups_per_step: .*written with 4, now it is 5"):
        restarted(made, rollout__groups_per_step=5)
    with pytest.raises(JournalError, match=r"rollout\.temperature: .*written with 1\.0, now it is 0\.7"):
        restarted(made, rollout__temperature=0.7)


def test_a_lease_of_another_prompt_than_the_next_one_is_damage():
    made = service()
    lease(made)
    journal = made.journal.crash(None)
    at = [record.kind for record in journal.records].index("lease")
    journal.records[at].fields["group"] = [0, 17]
    again = bare_service(journal)
    with pytest.raises(JournalError, match=r"leases prompt \(0, 17\), and the dataset's next is \(0, 0\)"):
        again.restore(journal.records, 1.0)


def test_the_line_for_a_replay_is_the_surviving_one():
    made = busy()
    make_step_3 = [t.group_id for t in made.buffer.line.steps[3].groups]
    made.handle("l", m.Committed(step=3, digest="d3"), 2.0)
    player = bare_service(made.journal)
    whole_line(player.run, made.journal.records)
    assert {step: made.digest for step, made in player.buffer.line.steps.items()} == {1: "d1", 2: "d2", 3: "d3"}
    assert [t.group_id for t in player.buffer.line.steps[3].groups] == make_step_3
    learner(made, "l2", version=1, digest="d1")
    made.handle("l2", m.Take(step=2, rank=0), 2.0)
    assert [record.fields["step"] for record in made.journal.records if record.kind == "take"] == [1, 2, 3, 2]
    trains(made, "l2", 2, "other")
    player = bare_service(made.journal)
    whole_line(player.run, made.journal.records)
    assert {step: made.digest for step, made in player.buffer.line.steps.items()} == {1: "d1", 2: "other"}


def test_an_evaluation_goes_on_after_a_restart_and_elsewhere_when_its_server_does_not_come_back():
    made = service(evaluated=1)
    made.handle("l", m.Evaluate(version=0), 0.0)
    made.handle("a", m.LeaseRequest(capacity=0, version=0, incarnation=1), 0.0)
    assert sent(made, "a", m.EvaluationLease)
    again = bare_service(made.journal.crash(None), evaluated=1)
    again.restore(made.journal.records, 100.0)
    learner(again, "l", incarnation=1, now=100.0)
    joins(again, "b", 100.0)
    again.handle("b", m.LeaseRequest(capacity=0, version=0, incarnation=1), 100.0)
    assert not sent(again, "b", m.EvaluationLease)
    again.handle("b", m.Heartbeat(), 109.0)
    again.tick(111.0)
    assert sent(again, "b", m.EvaluationLease)


def test_a_journal_is_not_started_over_nor_written_by_two(tmp_path):
    cfg = bare_service(run__dir=str(tmp_path), run__name="run", replay__fsync="never").config
    journal, _ = open_journal(cfg, "run", recover=False)
    journal.append("end", {"reason": "", "failed": False})
    with pytest.raises(JournalError, match="run/journal: another replay is writing this journal"):
        open_journal(cfg, "run", recover=True)
    journal.close()  # the first one was not harmed: it writes the rest
    with pytest.raises(JournalError, match=r"run/journal: this run has a journal; .* --resume"):
        open_journal(cfg, "run", recover=False)
    journal, records = open_journal(cfg, "run", recover=True)
    journal.close()
    assert [record.kind for record in records] == ["segment", "end"]


def test_a_learner_waits_for_a_replay_that_reads_its_journal_for_longer_than_silence_may_last(monkeypatch):
    """The journal is read in a thread; whoever speaks meanwhile hears that replay lives."""
    monkeypatch.setattr(dialog, "ASK_AGAIN_S", 0.1)
    cfg = bare_service(network__silent_after_s=1.0, network__heartbeat_s=0.2).config

    async def serve_late():
        router, seen = AsyncRouter("127.0.0.1", 0, "run", m.TO_REPLAY), Counter()
        rank = BatchReader(cfg, router.address, rank=0, fingerprint={})
        asked = asyncio.create_task(asyncio.to_thread(rank.connect))
        try:
            assert await keep_company(router, lambda: time.sleep(2.5) or "read", lambda: "reading") == "read"
            assert not asked.done(), "it is not told anything yet, and does not give up"
            while not asked.done():
                await router.wait(0.1)
                while (arrived := await router.receive()) is not None:
                    seen[type(arrived[1].message).__name__] += 1
                    await router.send(arrived[0], m.Status(state={"incarnation": 3}))
            assert await asked == ("run", 3)
        finally:
            rank.abandon()
            router.close()
        return seen

    assert set(asyncio.run(serve_late())) == {"StatusRequest"}


INDIFFERENT = {"learner__total_steps": 9, "learner__restarts": 9, "limits__flat_reward_steps": 9}
CHANGED = {"learner__lr": 0.5, **INDIFFERENT}


@pytest.mark.parametrize("forgets", [False, True], ids=["boot", "snapshot"])
@pytest.mark.parametrize("playback", [False, True])
def test_weights_that_differ_under_other_settings_are_laid_to_these(playback, forgets, caplog):
    made = busy()
    if forgets:  # of the boot, which recovery does not read behind a checkpoint
        made.handle("l", m.Checkpointed(step=1, kept=[1]), 1.0)
    for settings, said in ((CHANGED, ": learner.lr 1e-06 -> 0.5"), (INDIFFERENT, "it is not deterministic")):
        again = restarted(made, **settings)
        if playback:
            again = bare_service(made.journal.crash(None), **settings)
            whole_line(again.run, made.journal.records)
            again.incarnations.playback = True
        learner(again, "l2", version=1, digest="d1")
        trains(again, "l2", 2, "other")
        last = next(line for line in reversed(caplog.messages) if "made weights other, the journal has d2" in line)
        assert said in last and "9" not in last, "what ends a run or starts it again makes no other weights"
        assert not again.run.changed or playback, "what is made from then on is of these settings"
