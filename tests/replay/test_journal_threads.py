"""The main loop beside a journal whose disk is busy, and a replay that is killed while its journal writes."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest

from replay import messages as m
from replay.channel import AsyncRouter, Dealer
from replay.journal import JournalReader, JournalWriter
from replay.serve import serve
from tests.replay.simulated_run import bare_service
from tests.support.waiting import PATIENT_S, until


@pytest.fixture
def disk(monkeypatch):
    """Syncs wait until this event is set."""
    free, real = threading.Event(), os.fdatasync

    def fdatasync(file):
        assert free.wait(PATIENT_S)
        real(file)

    free.set()
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    yield free
    free.set()


def reply(dealer, kind):
    """The next message of a kind; others may come before it."""
    while (envelope := dealer.poll(PATIENT_S)) is not None:
        if isinstance(envelope.message, kind):
            return envelope.message
    raise AssertionError(f"no {kind.__name__} came")


def test_beats_and_states_go_on_while_the_disk_is_busy_and_answers_follow_at_once(tmp_path, disk):
    async def main(body):
        router, stop = AsyncRouter("127.0.0.1", 0, "run", m.TO_REPLAY), threading.Event()
        journal = JournalWriter(tmp_path / "journal", "run", fsync="every")
        made = bare_service(journal)
        journal.start(partial(asyncio.get_running_loop().call_soon_threadsafe, router.wake))
        serving = asyncio.create_task(serve(router, made, 0.02, stop.is_set))
        try:
            await asyncio.to_thread(body, router.address, made)
        finally:
            stop.set()
            await serving
            router.close()
            disk.set()
            journal.close()

    def body(address, made):
        with Dealer(address, "a", m.FROM_REPLAY) as server, Dealer(address, "l", m.FROM_REPLAY) as learner:
            server.send(m.Hello(role="rollout_server", name="rollout-a", pid=1, host="h"))
            reply(server, m.Welcome)
            disk.clear()
            before = made.journal.written
            learner.send(m.Hello(role="learner", name="learner-0", pid=1, host="h", digest="d0"))
            until(lambda: made.incarnation == 1, "the learner's start")
            for _ in range(3):
                server.send(m.StatusRequest())
                reply(server, m.Status)
                reply(server, m.Heartbeat)
            heard = list(iter(lambda: learner.poll(0), None))
            assert {type(each.message) for each in heard} <= {m.Heartbeat} and made.journal.written == before
            disk.set()
            reply(learner, m.Welcome)
            assert made.journal.written > before

    asyncio.run(main(body))


CHILD = """
import os, random, sys, time
from pathlib import Path
from replay.journal import JournalWriter

fsync, rng, real = sys.argv[2], random.Random(), os.fdatasync
def slow(file):
    time.sleep(rng.random() * 0.01)
    real(file)
os.fdatasync = slow
journal = JournalWriter(Path(sys.argv[1]), "run", fsync=fsync)
journal.start(lambda: print(journal.written, flush=True))
for step in range(100000):
    journal.append("commit", {"step": step, "text": "x" * rng.randint(0, 9000)})
    if rng.random() < 0.5:
        number = journal.submit()
        while rng.random() < 0.5 and journal.written < number:
            time.sleep(0.001)
    if rng.random() < 0.05:
        journal.begin_segment()
        journal.append("snapshot", {"step": step})
        if rng.random() < 0.5:
            journal.release(journal.segment)
"""


@pytest.mark.parametrize("fsync", ["every", "interval"])
def test_a_kill_at_any_moment_takes_nothing_that_was_said_to_be_written(tmp_path, fsync):
    child = subprocess.Popen([sys.executable, "-c", CHILD, tmp_path, fsync], stdout=subprocess.PIPE, text=True)
    said = [child.stdout.readline()]
    time.sleep(random.random() * 0.2)
    child.send_signal(signal.SIGKILL)
    said += child.stdout.readlines()
    child.wait(PATIENT_S)
    reader = JournalReader(tmp_path)
    numbers = [record.number for record in reader.records(reader.newest_snapshot(), cut=True)]
    assert numbers[-1] >= max(int(line) for line in said if line.endswith("\n"))
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
