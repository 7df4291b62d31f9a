"""The real replay process and its journal: killed at any point, on a full disk, beside a damaged journal."""

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from replay_process import GROUPS_PER_STEP, RUN_ID, Learner, Replay, RolloutServer, contents

from learner import batches
from learner.batches import BatchReader
from replay import messages as m
from replay.channel import AsyncRouter
from replay.journal import JournalReader
from replay.serve import keep_company


@contextmanager
def a_run(folder: Path, **replay: Any) -> Iterator[tuple[Replay, RolloutServer, Learner]]:
    """A replay that serves, with one rollout server and one learner."""
    process = Replay(folder, **replay)
    peers: list[RolloutServer | Learner] = []
    try:
        process.start()
        server, learner = RolloutServer(process), Learner(process)
        peers += [server, learner]
        server.until(lambda: len(server.leases) == 2 * GROUPS_PER_STEP, "8 leases", learner)
        yield process, server, learner
    finally:
        for peer in peers:
            peer.close()
        process.kill()


def journalled_groups(process: Replay) -> set[tuple[int, ...]]:
    records = JournalReader(process.journal).records()
    return {(*r.fields["group"], r.fields["attempt"]) for r in records if r.kind == "group"}


def test_kill_9_loses_nothing_that_was_acked_and_leases_go_on(tmp_path):
    with a_run(tmp_path, fsync="interval") as (process, server, learner):
        keys = sorted(server.leases)
        for key in keys[:5]:
            server.answer(key)
        server.until(lambda: not server.unacked, "5 acks", learner)
        process.kill()
        assert journalled_groups(process) == set(keys[:5]) == server.accepted
        process.start("--recover")

        for key in keys[5:]:
            server.answer(key)
        server.until(lambda: not server.unacked, "the acks of leases that were granted before", learner)
        assert server.accepted == set(keys) and not server.leases, "the same leases went on, and no other was granted"
        assert "recovered from" in process.log()

        learner.until(lambda: learner.ask(1) or learner.batches.get(1), "batch 1", server)
        process.kill()
        process.start("--recover")
        before = len(learner.batches[1])
        learner.until(lambda: learner.ask(1) or len(learner.batches[1]) > before, "batch 1 again", server)
        first, *_, again = learner.batches[1]
        assert contents(first) == contents(again)
        assert first.group_ids == [list(key[:2]) for key in keys[:4]]
        learner.until(lambda: learner.ask(1) or 1 in learner.proceeds, "Proceed", server)
        learner.commit(1)
        learner.until(lambda: learner.ask(2) or learner.batches.get(2), "batch 2", server)
        assert learner.batches[2][0].group_ids == [list(key[:2]) for key in keys[4:]]
    records = list(JournalReader(process.journal).records())
    kinds = [record.kind for record in records]
    assert kinds.count("boot") == 3 and kinds.count("learner") == 1
    takes = [(r.fields["step"], r.fields["groups"]) for r in records if r.kind == "take"]
    assert [step for step, _ in takes] == [1, 1, 2] and takes[0] == takes[1]
    assert kinds.count("lease") == kinds.count("group") + len(server.leases), "nothing was leased twice"


def test_a_learner_waits_for_a_replay_that_reads_its_journal_for_longer_than_silence_may_last(tmp_path, monkeypatch):
    """The journal is read in a thread; whoever speaks meanwhile hears that replay lives."""
    monkeypatch.setattr(batches, "ASK_AGAIN_S", 0.1)
    config = Replay(tmp_path).config
    network = config.network.model_copy(update={"silent_after_s": 0.4})
    config = config.model_copy(update={"network": network})

    async def serve_late() -> Counter[str]:
        router, seen = AsyncRouter("127.0.0.1", 0, RUN_ID, m.TO_REPLAY), Counter[str]()
        learner = BatchReader(config, router.address, rank=0, fingerprint={})
        asked = asyncio.create_task(asyncio.to_thread(learner.connect))
        try:
            assert await keep_company(router, lambda: time.sleep(1.5) or "read", lambda: "reading") == "read"
            assert not asked.done(), "it is not told anything yet, and does not give up"
            while not asked.done():
                await router.wait(0.1)
                while (arrived := await router.receive()) is not None:
                    seen[type(arrived[1].message).__name__] += 1
                    await router.send(arrived[0], m.Status(state={"incarnation": 3}))
            assert await asked == (RUN_ID, 3)
        finally:
            learner.abandon()
            router.close()
        return seen

    assert set(asyncio.run(serve_late())) == {"StatusRequest"}


def limit_files(process: Replay, size: int) -> None:
    """Let the live process write no byte of a file behind `size`; -1 lifts the limit."""
    assert process.process is not None
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (size, -1))


@pytest.mark.parametrize("killed", [False, True], ids=["room again", "killed meanwhile"])
def test_nothing_is_acked_while_the_disk_is_full(tmp_path, killed):
    with a_run(tmp_path) as (process, server, learner):
        first, second, *rest = sorted(server.leases)
        server.answer(first, tokens=1000)  # the log must stay smaller than the journal: its limit is the same
        server.until(lambda: not server.unacked, "the first ack", learner)
        limit_files(process, process.last_file().stat().st_size + 500)
        server.answer(second, tokens=1000)
        until, heard = time.monotonic() + 2.0, server.heard
        while time.monotonic() < until:
            server.pump()
            learner.pump()
        assert second in server.unacked and (second, "accepted") not in server.acks
        assert server.heard > heard, "heartbeats go on"
        assert "nothing is acknowledged" in process.log() and "[full]" in process.log()
        assert journalled_groups(process) == {first}
        if killed:
            process.kill()
            process.start("--recover")
        else:
            limit_files(process, -1)
        server.until(lambda: not server.unacked, "the second ack", learner)
        for key in rest:
            server.answer(key)
        server.until(lambda: not server.unacked, "the other acks", learner)
        assert killed or "the journal is written again" in process.log()
        process.kill()
        assert journalled_groups(process) == {first, second, *rest} == server.accepted


def test_a_journal_is_not_started_over_nor_written_by_two(tmp_path):
    with a_run(tmp_path) as (process, server, learner):
        key = min(server.leases)
        said = process.refused("--recover", "--port", "0")
        assert "another replay is writing this journal" in said and str(process.journal) in said
        server.answer(key)
        server.until(lambda: not server.unacked, "the ack: the first replay was not harmed", learner)
        process.kill()
        said = process.refused()
        assert "this run has a journal" in said and "--resume" in said
        process.start("--recover")
        process.kill()
        assert journalled_groups(process) == {key}
