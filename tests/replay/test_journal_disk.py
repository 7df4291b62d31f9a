"""The journal on disks that are full, refuse to sync, are slow, or lose their power."""

import errno
import os
import random
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.journal import (
    JournalDamaged,
    JournalError,
    JournalFull,
    JournalReader,
    JournalReadOnly,
    JournalWriter,
    writer,
)
from replay.journal.format import path_of, segments
from replay.journal.reader import BLOCK_BYTES
from tests.replay.journal_files import (
    Books,
    a_journal,
    entries,
    entry,
    fill_up,
    flush,
    frames_of,
    group,
    opened,
    same,
)
from tests.support.disks import small_disk
from tests.support.waiting import until


def test_a_full_file_system_costs_nothing(tmp_path):
    """256 KiB and four files, of which `ballast` takes 150 KiB and one."""
    with small_disk(tmp_path, "size=256k", "nr_inodes=4") as folder:
        (folder / "ballast").write_bytes(bytes(150_000))
        fill_up(folder / "journal", "every", (folder / "ballast").unlink)


def failing(number, times=10**9, then=None):
    """A system call that fails so often."""
    calls = []

    def call(*arguments):
        calls.append(arguments)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        return then(*arguments)

    call.calls = calls
    return call


@pytest.fixture
def syncs(monkeypatch):
    """Sizes of the files that were synced, in order."""
    seen, real = [], os.fdatasync

    def fdatasync(file):
        real(file)
        seen.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return seen


def size_of(folder):
    return path_of(folder, 1).stat().st_size


def written(folder, fsync):
    """A writer of a new journal that has flushed a record."""
    made = JournalWriter(folder, "run", fsync=fsync)
    made.append("take", {"step": 1})
    flush(made)
    return made


def test_what_was_found_is_synced_before_anybody_relies_on_it(tmp_path, syncs):
    left = a_journal(tmp_path)
    made, found = opened(tmp_path, "every")
    assert found == left and syncs == [size_of(tmp_path)]
    made.close()


def test_a_folder_that_cannot_be_synced_gets_no_file(tmp_path, monkeypatch):
    """A file that was begun in vain would turn a torn end of the one before it into damage."""
    made, real = JournalWriter(tmp_path, "run", fsync="every"), os.fsync
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, 1, real))
    made.begin_segment()
    with pytest.raises(JournalError, match="cannot be begun: Input/output error"):
        flush(made)
    assert segments(tmp_path) == [1]
    flush(made)
    assert segments(tmp_path) == [1, 2]
    made.close()


def disk_thread(call):
    """A system call that the thread `name` of the journal waits in: `entered` says so, `leave` lets it go."""
    made = SimpleNamespace(entered=threading.Event(), leave=threading.Event(), name="")

    def waiting(*given):
        if threading.current_thread().name == made.name:
            made.entered.set()
            assert made.leave.wait(30)
        return call(*given)

    made.call = waiting
    return made


@pytest.fixture
def slow(monkeypatch):
    """The disk does not answer the thread `slow.name` until `slow.leave` is set."""
    made = disk_thread(os.fdatasync)
    monkeypatch.setattr(os, "fdatasync", made.call)
    yield made
    made.leave.set()


def started(folder, fsync):
    """A journal with its threads, and an event that each of their news sets."""
    made, news = JournalWriter(folder, "run", fsync=fsync), threading.Event()
    made.start(news.set)
    return made, news


def reaches(made, news, number, what="written"):
    """Wait until a record is written, or on the disk."""
    until(lambda: news.wait(0.1) and getattr(made, what) >= number, f"record {number} to be {what}")


def test_a_sync_that_takes_long_keeps_no_record_waiting(tmp_path, slow):
    slow.name, (made, news) = "journal-sync", started(tmp_path, "interval")
    books = Books(made)
    for index in range(50):
        books.append(*entry(random.Random(index), index))
        reaches(made, news, made.submit())
        assert slow.entered.wait(10)
    assert entries(tmp_path) == books.entries and made.on_disk < made.written
    slow.leave.set()
    made.close()


def test_records_that_come_while_the_disk_is_busy_share_one_sync_and_are_not_written_before(tmp_path, slow, syncs):
    """Group commit: whoever appends waits for nothing, and what was appended can be read meanwhile."""
    slow.name, (made, news) = "journal-write", started(tmp_path, "every")
    books, first = Books(made), made.written
    books.append(*entry(random.Random(0), 0))
    busy = made.submit()
    assert slow.entered.wait(30)
    for index in range(1, 20):
        place = books.append(*entry(random.Random(index), index, tokens=300))
        last = made.submit()
        assert not place.sizes or same(made.read(place), books.entries[-1][2])
    assert made.written == first < busy < last, "nothing is told of before it is on the disk"
    done = len(syncs)
    slow.leave.set()
    reaches(made, news, last)
    assert len(syncs) == done + 2 and entries(tmp_path) == books.entries
    made.close()


def test_a_wanted_sync_is_not_put_off_and_says_when_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SYNC_S", 600.0)
    made, news = started(tmp_path, "interval")
    for step in range(1, 4):  # also when the record before it was written long ago
        made.append("commit", {"step": step})
        reaches(made, news, made.submit())
        reaches(made, news, made.want_sync(), "on_disk")
    made.close()


def test_a_sync_that_is_under_way_is_not_taken_for_one_that_failed(tmp_path, slow, monkeypatch):
    """The syncing thread waits for the disk while the writing one begins a file: nothing is written a second time."""
    rewritten, real = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *given: rewritten.append(given) or real(*given))
    slow.name, (made, news) = "journal-sync", started(tmp_path, "interval")
    made.append("lease", {"group": [0, 0]})
    made.submit()
    assert slow.entered.wait(30)
    made.begin_segment()
    number = made.submit()
    news.wait(0.2)  # a sync that was taken for failed would have been written again by itself
    assert made.written < number
    slow.leave.set()
    reaches(made, news, number)
    made.close()
    assert rewritten == []


def test_a_background_sync_that_fails_is_said_and_done_again_with_its_bytes(tmp_path, monkeypatch, caplog):
    """It is no problem of those who only wait for the write, and one of those who wait for the disk."""
    monkeypatch.setattr(writer, "SYNC_S", 0.01)
    copied, real_write = [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda f, data, at: copied.append((at, len(data))) or real_write(f, data, at))
    made, news = started(tmp_path, "interval")
    number = made.append("take", {"step": 1}) and made.submit()
    reaches(made, news, number, "on_disk")
    real, broken = os.fdatasync, failing(errno.EIO)
    monkeypatch.setattr(os, "fdatasync", broken)
    made.append("take", {"step": 2})
    reaches(made, news, made.submit())
    until(lambda: len(broken.calls) >= 2, "a second sync")
    assert made.problem is None
    number = made.want_sync()
    assert "it cannot be synced: Input/output error" in str(made.problem) and made.on_disk < number
    monkeypatch.setattr(os, "fdatasync", real)
    reaches(made, news, number, "on_disk")
    until(lambda: made.problem is None, "the problem to be over")
    made.close()
    said = [line for line in caplog.messages if "the journal was not synced, which is tried again" in line]
    assert len(said) == 1 and "Input/output error" in said[0] and sum(copied[-1]) == size_of(tmp_path)
    assert [kind for kind, *_ in entries(tmp_path) if kind != "synced"] == ["take", "take"]


def test_a_thread_that_fails_is_a_problem_that_ends_the_run(tmp_path, monkeypatch):
    made, _ = started(tmp_path, "never")
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(made._files, "write", lambda *_: 1 // 0)
    made.append("take", {"step": 1})
    made.submit()
    until(lambda: isinstance(made.problem, JournalReadOnly), "the end of the thread to be seen")


def test_a_problem_is_tried_again_by_itself_and_what_waited_is_written_in_order(tmp_path, monkeypatch):
    made, news = started(tmp_path, "every")
    books, real = Books(made), os.writev
    monkeypatch.setattr(os, "writev", failing(errno.ENOSPC))
    for index in range(9):
        books.append(*entry(random.Random(index), index))
        if index == 4:
            made.begin_segment()
        number = made.submit()
    until(lambda: isinstance(made.problem, JournalFull), "the full disk to be seen")
    assert made.written < number and entries(tmp_path) == []
    monkeypatch.setattr(os, "writev", real)
    reaches(made, news, number)
    assert entries(tmp_path) == books.entries and segments(tmp_path) == [1, 2]
    until(lambda: made.problem is None, "the problem to be over")
    made.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_what_may_not_be_written_any_more_is_not_taken_for_a_full_disk(tmp_path, monkeypatch, number):
    made = written(tmp_path, "never")
    made.append("take", {"step": 2})
    monkeypatch.setattr(os, "writev", failing(number, 1, os.writev))
    with pytest.raises(
        JournalReadOnly, match=rf"000001\.seg: .*: {os.strerror(number)}; make it writable and --resume"
    ):
        flush(made)
    made.close()
    assert [fields["step"] for _, fields, *_ in entries(tmp_path)] == [1, 2]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, JournalFull), (errno.EIO, JournalError)])
def test_a_sync_that_fails_is_a_flush_that_fails(tmp_path, monkeypatch, number, kind):
    books = Books(JournalWriter(tmp_path, "run", fsync="every"))
    books.append(*entry(random.Random(0), 0))
    flush(books.writer)
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", failing(number))
    place = books.append("group", {"group": [0, 1]}, frames_of(group(1)))
    for _ in range(2):
        with pytest.raises(kind, match=os.strerror(number)):
            flush(books.writer)
    assert entries(tmp_path) == books.entries[:1], "it is written again, not only synced again"
    assert same(books.writer.read(place), books.entries[1][2])
    monkeypatch.setattr(os, "fdatasync", real)
    flush(books.writer)
    assert entries(tmp_path) == books.entries
    books.writer.close()


class PowerFailure(BaseException):
    """Nothing is executed any more."""


class Disk:
    """What of a folder is on the disk for sure: its bytes at their last fdatasync, its names at the last fsync."""

    def __init__(self, folder: Path, fails_at: int) -> None:
        self.folder, self._fails_at = folder, fails_at
        self.bytes: dict[str, bytes] = {}
        self.names: set[str] = set()
        self._calls = 0

    def fdatasync(self, file: int) -> None:
        self._count()
        path = Path(os.readlink(f"/proc/self/fd/{file}"))
        self.bytes[path.name] = path.read_bytes()

    def fsync(self, _: int) -> None:
        self._count()
        self.names = {path.name for path in self.folder.iterdir()}

    def _count(self) -> None:
        self._calls += 1
        if self._calls > self._fails_at:
            raise PowerFailure

    def after_the_failure(self, folder: Path, rng: random.Random) -> None:
        """What a machine finds: of what was not synced any blocks, zeros in place of others, any length."""
        folder.mkdir()
        now = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        for name in now.keys() | self.names:
            sure = self.bytes.get(name, b"")
            kept = name in now and name in self.names
            if kept or rng.random() < 0.5:  # made or deleted since: it may go either way
                (folder / name).write_bytes(sure + self._rest(sure, now.get(name, sure), rng))

    @staticmethod
    def _rest(sure: bytes, now: bytes, rng: random.Random) -> bytes:
        share = rng.choice([0.0, 0.5, 0.9, 1.0])
        rest = bytearray(now[len(sure) :])
        start = len(sure)
        while start < len(now):
            end = min(len(now), start - start % BLOCK_BYTES + BLOCK_BYTES)
            if rng.random() >= share:
                rest[start - len(sure) : end - len(sure)] = bytes(end - start)
            start = end
        return bytes(rest[: rng.choice([len(rest), rng.randint(0, len(rest)), 0])])


def lose_a_block(path, offset):
    """The first block of a file that begins at `offset` or behind it was never written."""
    data, block = bytearray(path.read_bytes()), -(-offset // BLOCK_BYTES) * BLOCK_BYTES
    data[block : block + BLOCK_BYTES] = bytes(BLOCK_BYTES)
    path.write_bytes(data)


@pytest.mark.parametrize(("index", "what"), [(0, "damage"), (2, "damage"), (3, "torn"), (4, "torn")])
def test_a_block_that_is_missing_is_damage_where_the_file_was_synced(tmp_path, index, what):
    """What was synced stands in the flush behind it, and the last flush, of three groups, has none behind it."""
    books = Books(JournalWriter(tmp_path, "run", fsync="every"))
    for number in range(6):
        books.append("group", {"group": [0, number]}, frames_of(group(number, tokens=2000)))
        if number in (0, 2):
            flush(books.writer)
    flush(books.writer)
    lose_a_block(path_of(tmp_path, 1), books.places[index].offset)
    if what == "damage":
        with pytest.raises(JournalDamaged, match="this is damage"):
            entries(tmp_path)
    else:
        assert entries(tmp_path) == books.entries[:index]


def write_until_the_power_fails(books: Books, rng: random.Random, fsync: str) -> int:
    """How many entries must be found afterwards."""
    sure = flushed = 0
    with suppress(PowerFailure):
        for index in range(rng.randint(1, 40)):
            if rng.random() < 0.1:
                books.writer.begin_segment()
                books.append("snapshot", {"index": index}, [])
                books.writer.release(rng.randint(1, books.writer.segment))
            kind, fields, frames = entry(rng, index, tokens=rng.choice([2, 300, 900]))
            books.append(kind, fields | {"index": index}, frames)
            if rng.random() < 0.3:
                books.writer.submit()  # and the disk is still busy
            if rng.random() < 0.5:
                flush(books.writer)
                flushed = len(books.entries)
                if fsync == "every":
                    sure = flushed
            if fsync == "interval" and rng.random() < 0.3:
                books.writer.sync()
                sure = max(sure, flushed)
    return sure


@settings(max_examples=150)
@given(seed=st.integers(0, 2**32), fsync=st.sampled_from(["every", "interval"]), fails_at=st.integers(2, 60))
def test_a_power_failure_takes_nothing_that_was_synced(tmp_path_factory, seed, fsync, fails_at):
    root, rng = tmp_path_factory.mktemp("power"), random.Random(seed)
    disk = Disk(root / "before", fails_at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", disk.fdatasync)
        patch.setattr(os, "fsync", disk.fsync)
        patch.setattr(writer, "SEGMENT_BYTES", rng.choice([10_000, 1 << 30]))
        books = Books(JournalWriter(root / "before", "run", fsync=fsync))
        sure = write_until_the_power_fails(books, rng, fsync)
    books.writer._files.close()
    after = root / "after"
    disk.after_the_failure(after, rng)
    reader = JournalReader(after)
    found = [r for r in reader.records(reader.newest_snapshot(), cut=True) if r.kind not in ("segment", "synced")]
    appended = [(kind, fields) for kind, fields, _ in books.entries]
    first = appended.index((found[0].kind, found[0].fields)) if found else 0
    assert first == 0 or found[0].kind == "snapshot"
    assert [(r.kind, r.fields) for r in found] == appended[first : first + len(found)]
    assert first + len(found) >= sure and reader.number >= books.writer.on_disk, "nothing that was synced is lost"
    for record, (_, _, frames) in zip(found, books.entries[first:], strict=False):
        assert not frames or same(reader.read(record.location), frames)
    on = JournalWriter(after, "run", fsync="never", after=reader)
    on.append("take", {"step": 1})
    on.close()
    again = JournalReader(after)
    assert list(again.records(again.newest_snapshot()))[-1].kind == "take"


def test_a_log_on_a_full_disk_writes_no_tracebacks():
    code = (
        "import logging; from slipstream.runtime.lifeline import set_up_logging; set_up_logging('x', None);"
        " logging.getLogger().addHandler(logging.FileHandler('/dev/full')); logging.getLogger('a').error('here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "here" in done.stderr and "Traceback" not in done.stderr
