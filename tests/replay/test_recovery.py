"""Replay restarted from its journal: what it had decided stands, what it told nobody of never happened."""

import asyncio
import time
from collections import Counter

import pytest

from learner import dialog
from learner.batches import BatchReader
from replay import messages as m
from replay.channel import AsyncRouter
from replay.journal import JournalError, JournalReadOnly
from replay.main import open_journal
from replay.player import whole_line
from replay.serve import keep_company
from replay.state.apply import boot_fields
from tests.replay.simulated_run import (
    bare_service,
    group_message,
    learner,
    lease,
    make_step,
    sent,
    service,
    trains,
)
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


def test_a_lowered_lag_survives_a_restart_and_gives_way_to_another_setting():
    made = busy(replay__async_lag=2)
    made.handle("l", m.LowerLag(step=2, async_lag=1), 1.0)
    for _ in range(2):  # from the records, and from a snapshot
        again = restarted(made, replay__async_lag=2)
        assert same(made, again) and again.buffer.async_lag == 1
        assert restarted(made, replay__async_lag=3).buffer.async_lag == 3
        made.handle("l", m.Committed(step=3, digest="d3"), 1.0)
        made.handle("l", m.Checkpointed(step=3, kept=[3]), 1.0)


def test_nothing_leaves_while_the_disk_is_full():
    made = service()
    assert made.sayable(0.0) and not made.outbox
    made.journal.full = True
    lease(made)
    made.handle("b", m.LeaseRequest(capacity=1, version=0, incarnation=1), 1.0)
    made.handle("viewer", m.StatusRequest(), 1.0)
    kept = len(made.outbox) - 1
    assert [type(said) for _, said in made.sayable(1.0)] == [m.Status], "it promises nothing"
    assert len(made.outbox) == kept > 0 and made.counters["journal_full"] == 1
    assert made.sayable(10 * made.config.learner.batch_deadline_s) == [] and made.ended is None, "it waits"
    assert made.report.of(9.0, ended=None, no_server_since=0.0)["waits"][0]["code"] == "disk"
    made.journal.full = False
    assert len(made.sayable(1e6)) == kept and made.unwritten_since is None, "and goes on"


def test_a_journal_that_has_become_read_only_ends_the_run_at_once(monkeypatch):
    made = service()
    assert made.sayable(0.0) and not made.outbox

    def flush():
        raise JournalReadOnly("journal/000001.seg: 7 bytes cannot be written: Read-only file system; make it writable")

    monkeypatch.setattr(made.journal, "flush", flush)
    lease(made)
    made.handle("viewer", m.StatusRequest(), 1.0)
    said = made.sayable(1.0) + made.sayable(1.0)
    assert {type(each) for _, each in said} == {m.Goodbye, m.Status} and not made.outbox
    assert made.failed and made.ended.startswith("replay cannot go on: journal/000001.seg: 7 bytes cannot be written")
    assert made.ended.endswith("make it writable [SLIP-JOURNAL-04]") and made.counters["journal_full"] == 0


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
